"""The choice of a copier for the memory of a KV cache."""

from __future__ import annotations

from offload_core.api.errors import ConfigError
from offload_core.memory.block_copier import CacheCopier, CpuBlockCopier
from offload_core.memory.canonical import CanonicalKVCaches
from offload_core.memory.device.batched_copy import BatchedCopy, copies_right
from offload_core.memory.device.stream_copier import StreamBlockCopier

_BUFFER_BYTES = 64 * 1024 * 1024
_BUFFER_PAYLOADS = 4
"""Payloads that the buffer on a device holds at least, if its size is not configured."""


def block_copier(
    caches: CanonicalKVCaches,
    largest_payload_bytes: int,
    *,
    device_buffer_bytes: int | None = None,
    batched_copy: BatchedCopy | None = None,
) -> CacheCopier:
    """Return the copier for the memory of ``caches``.

    Args:
        device_buffer_bytes: size of the buffer on an accelerator. By default 64 MiB, or room for four payloads if that
            is more.
        batched_copy: used on an accelerator if a trial finds that it copies the right bytes.

    Raises:
        ConfigError: ``device_buffer_bytes`` is too small for a payload.
    """
    if all(tensor.tensor.device.type == "cpu" for tensor in caches.tensors):
        return CpuBlockCopier(caches)
    if device_buffer_bytes is None:
        device_buffer_bytes = max(_BUFFER_BYTES, _BUFFER_PAYLOADS * largest_payload_bytes)
    elif device_buffer_bytes < largest_payload_bytes:
        raise ConfigError(
            [
                f"device_buffer_bytes: {device_buffer_bytes} is too small for this model's objects of up to "
                f"{largest_payload_bytes} bytes; set it to {largest_payload_bytes} or more, or leave it out"
            ]
        )
    if batched_copy is not None and not copies_right(batched_copy, caches.tensors[0].tensor.device):
        batched_copy = None
    return StreamBlockCopier(caches, device_buffer_bytes, batched_copy)
