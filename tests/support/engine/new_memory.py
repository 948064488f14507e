"""The part of sleep mode that a worker without a GPU can do: its KV cache loses its content behind the connector."""

from __future__ import annotations

from typing import Any

_LOST = 0xA5


def give_new_memory(worker: Any) -> None:
    """Do as vLLM 0.33 does to a worker between sleep and wake-up; for vLLM's ``collective_rpc``."""
    import torch
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    connector.unregister_kv_caches()
    for tensor in connector._worker_half._kv_caches.values():
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(_LOST)
    connector.restore_kv_caches()
