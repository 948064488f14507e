"""The choice of a copier for the memory of a KV cache."""

from __future__ import annotations

import torch

from offload_core.api.errors import ConfigError
from offload_core.memory.block_copier import CacheCopier, CpuBlockCopier
from offload_core.memory.canonical import CanonicalKVCaches
from offload_core.memory.device.batched_copy import BatchedCopy, copies_right
from offload_core.memory.device.pinned_pieces import PinnedPieces
from offload_core.memory.device.stream_copier import StreamBlockCopier

_BUFFER_BYTES = 64 * 1024 * 1024
_BUFFER_PAYLOADS = 4
"""Payloads that the buffer on a device holds at least, if its size is not configured."""
_PART_OF_ALL, _PART_OF_FREE = 256, 16
"""Parts of the device's memory, and of its memory that is free beside the KV cache; the buffer takes the smaller."""


def block_copier(
    caches: CanonicalKVCaches,
    largest_payload_bytes: int,
    *,
    device_buffer_bytes: int | None = None,
    batched_copy: BatchedCopy | None = None,
    pinned: PinnedPieces | None = None,
) -> CacheCopier:
    """Return the copier for the memory of ``caches``.

    Args:
        device_buffer_bytes: size of the buffer on an accelerator; by default see :func:`default_buffer_bytes`.
        batched_copy: used on an accelerator if a trial finds that it copies the right bytes.
        pinned: host memory that batched copies use.

    Raises:
        ConfigError: ``device_buffer_bytes`` is too small for a payload.
    """
    device = caches.tensors[0].tensor.device
    if all(tensor.tensor.device.type == "cpu" for tensor in caches.tensors):
        return CpuBlockCopier(caches)
    if device_buffer_bytes is None:
        device_buffer_bytes = default_buffer_bytes(largest_payload_bytes, *_memory_info(device))
    elif device_buffer_bytes < largest_payload_bytes:
        raise ConfigError(
            [
                f"device_buffer_bytes: {device_buffer_bytes} is too small for this model's objects of up to "
                f"{largest_payload_bytes} bytes; set it to {largest_payload_bytes} or more, or leave it out"
            ]
        )
    if batched_copy is not None and not copies_right(batched_copy, device):
        batched_copy = None
    return StreamBlockCopier(caches, device_buffer_bytes, batched_copy, pinned)


def default_buffer_bytes(largest_payload_bytes: int, free_bytes: int, all_bytes: int) -> int:
    """Return the size of the buffer on a device if none is configured.

    A step of a large device completes more bytes. So the buffer is a 256th of the device's memory, or a 16th of the
    free memory if that is less. It is at least 64 MiB, or room for four payloads if that is more.

    Args:
        free_bytes: the device's memory that is free beside the KV cache.
        all_bytes: the device's memory.
    """
    share = min(all_bytes // _PART_OF_ALL, free_bytes // _PART_OF_FREE)
    return max(_BUFFER_BYTES, _BUFFER_PAYLOADS * largest_payload_bytes, share)


def _memory_info(device: torch.device) -> tuple[int, int]:
    """Return the free bytes and all bytes of a device; zeros if torch cannot tell."""
    try:
        free_bytes, all_bytes = torch.accelerator.get_memory_info(device)
    except (AttributeError, NotImplementedError, RuntimeError):  # an older torch, or a device that cannot tell
        return 0, 0
    return free_bytes, all_bytes
