"""The choice of a copier for the memory of a KV cache."""

from __future__ import annotations

from offload_core.memory.block_copier import CacheCopier, CpuBlockCopier
from offload_core.memory.canonical import CanonicalKVCaches
from offload_core.memory.stream_copier import StreamBlockCopier

_BUFFER_BYTES = 64 * 1024 * 1024
_BUFFER_PAYLOADS = 4
"""Payloads that the buffer on a device holds at least."""


def block_copier(caches: CanonicalKVCaches, largest_payload_bytes: int) -> CacheCopier:
    """Return the copier for the memory of ``caches``.

    On an accelerator it takes 64 MiB of the device's memory, or room for four payloads if that is more.
    """
    if all(tensor.tensor.device.type == "cpu" for tensor in caches.tensors):
        return CpuBlockCopier(caches)
    return StreamBlockCopier(caches, max(_BUFFER_BYTES, _BUFFER_PAYLOADS * largest_payload_bytes))
