"""Block ids on their way to a device, in memory that is allocated once: an allocation may wait for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload_core.memory.device.device_buffer import DeviceBuffer

_IDS = 64 * 1024
_ID_BYTES = 8


class BlockIdBuffer:
    """Lists of block ids, in pinned host memory and on the device. They are freed in the order of their puts.

    Args:
        ids: number of ids that the buffer holds.
    """

    def __init__(self, device: torch.device, ids: int = _IDS) -> None:
        self._host = torch.empty(ids, dtype=torch.int64, pin_memory=True)
        self._values = self._host.numpy()
        self._device = torch.empty(ids, dtype=torch.int64, device=device)
        self._slots = DeviceBuffer(ids * _ID_BYTES)

    def try_put(self, block_ids: Sequence[int]) -> torch.Tensor | None:
        """Copy ids to the device, on the current stream.

        Returns:
            The int64 tensor on the device, for work on the same stream; ``None`` if there is no room.
        """
        start = self._slots.try_take(len(block_ids) * _ID_BYTES)
        if start is None:
            return None
        first = start // _ID_BYTES
        last = first + len(block_ids)
        self._values[first:last] = block_ids
        ids = self._device[first:last]
        ids.copy_(self._host[first:last], non_blocking=True)
        return ids

    def free_oldest(self) -> None:
        """Free the ids that were put first. The work that uses them has ended."""
        self._slots.free_oldest()
