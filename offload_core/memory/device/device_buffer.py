"""The slots of a buffer that are freed in the order in which they were taken. Pure arithmetic, for one thread."""

from __future__ import annotations

from collections import deque

_ALIGNMENT_BYTES = 256
"""Devices copy fastest from addresses that are multiples of this."""


def slot_bytes(nbytes: int) -> int:
    """Return the bytes of a slot for ``nbytes`` bytes."""
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class DeviceBuffer:
    """Slots in ``nbytes`` bytes. A slot is one piece: if it does not fit before the end, it is at the beginning."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._slots: deque[tuple[int, int]] = deque()  # (first byte, byte after the last), the oldest first

    def try_take(self, nbytes: int) -> int | None:
        """Return the first byte of a new slot, or ``None`` if there is no room for it now."""
        start = self._start_of(nbytes)
        if start is not None:
            self._slots.append((start, start + slot_bytes(nbytes)))
        return start

    def has_room(self, nbytes: int) -> bool:
        """Return whether there is room for a new slot now."""
        return self._start_of(nbytes) is not None

    def free_oldest(self) -> None:
        """Free the slot that was taken first."""
        self._slots.popleft()

    def _start_of(self, nbytes: int) -> int | None:
        """Return the first byte of a slot that could be taken now."""
        needed = slot_bytes(nbytes)
        for start, end in self._free_pieces():
            if end - start >= needed or (end == self._nbytes and end - start >= nbytes):
                return start
        return None

    def _free_pieces(self) -> tuple[tuple[int, int], ...]:
        """Return the free pieces that the next slot may use, in the order of their use."""
        if not self._slots:
            return ((0, self._nbytes),)
        oldest, newest = self._slots[0][0], self._slots[-1][1]
        if self._slots[-1][0] < oldest:  # the newest slots are at the beginning again
            return ((newest, oldest),)
        return ((newest, self._nbytes), (0, oldest))
