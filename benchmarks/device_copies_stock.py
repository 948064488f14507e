"""vLLM's own copies between an accelerator and host memory, on the same blocks, for :mod:`benchmarks.device_copies`."""

from __future__ import annotations

from typing import Any

import torch


class StockCopies:
    """vLLM's handlers of its CPU offloading, one per direction.

    Args:
        memory: pages on the device, of shape (blocks, page bytes).
        host: pages in pinned host memory, one for each block.
    """

    def __init__(self, memory: torch.Tensor, host: torch.Tensor) -> None:
        from vllm.v1.kv_offload.base import CanonicalKVCacheRef
        from vllm.v1.kv_offload.cpu.gpu_worker import SingleDirectionOffloadingHandler

        references = [[CanonicalKVCacheRef(0, memory.shape[1])]]
        self._store, self._load = (
            SingleDirectionOffloadingHandler([memory], [host], 1, references, gpu_to_cpu=to_host)
            for to_host in (True, False)
        )
        self._jobs = 0

    @classmethod
    def of(cls, memory: torch.Tensor, host: torch.Tensor) -> StockCopies | None:
        """Return the handlers, or ``None`` if the installed vLLM has none for the device."""
        try:
            return cls(memory, host)
        except (ImportError, AssertionError, TypeError):
            return None

    def store(self, blocks: list[int]) -> None:
        """Copy blocks to host memory and wait for the end."""
        self._run(self._store, self._on_device(blocks), self._in_host_memory(blocks))

    def load(self, blocks: list[int]) -> None:
        """Copy blocks from host memory and wait for the end."""
        self._run(self._load, self._in_host_memory(blocks), self._on_device(blocks))

    def _run(self, handler: Any, source: Any, target: Any) -> None:
        self._jobs += 1
        handler.transfer_async(self._jobs, source, target)
        handler.wait({self._jobs})
        handler.get_finished()

    @staticmethod
    def _on_device(blocks: list[int]) -> Any:
        from vllm.v1.kv_offload.base import GPULoadStoreSpec

        return GPULoadStoreSpec(blocks, [len(blocks)], [0])

    @staticmethod
    def _in_host_memory(blocks: list[int]) -> Any:
        from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

        return CPULoadStoreSpec(blocks)
