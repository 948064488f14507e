"""The memory that the engine's process and the child share, and its division among objects."""

from __future__ import annotations

import bisect
import mmap
import threading
import time
from collections import deque
from typing import NamedTuple

import numpy as np

PAGE_BYTES = 4096


class Slot(NamedTuple):
    """A part of the memory, for one object."""

    offset: int
    nbytes: int


class Ring:
    """Shared memory in which callers reserve slots. Waiting callers are served in their order.

    Args:
        descriptor: the memory's file.
        nbytes: its size, a multiple of the page size.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = mmap.mmap(descriptor, nbytes)
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self._free = [(0, nbytes)]  # (offset, bytes) in the order of offsets; neighbours are always merged
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._is_closed = False

    def reserve(self, nbytes: int, until_seconds: float) -> Slot | None:
        """Return a slot of ``nbytes``, or ``None`` if there is none until ``until_seconds``, or after :meth:`close`."""
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                while True:
                    if self._waiting[0] is ticket and (slot := self._take(nbytes)) is not None:
                        return slot
                    remaining = until_seconds - time.monotonic()
                    if self._is_closed or remaining <= 0 or not self._changed.wait(remaining):
                        return None
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def release(self, slot: Slot) -> None:
        """Give a slot back. Nothing may touch its memory any more."""
        start, end = slot.offset, slot.offset + _whole_pages(slot.nbytes)
        with self._changed:
            index = bisect.bisect(self._free, (start, 0))
            if index < len(self._free) and self._free[index][0] == end:
                end += self._free.pop(index)[1]
            if index > 0 and sum(self._free[index - 1]) == start:
                index -= 1
                start = self._free.pop(index)[0]
            self._free.insert(index, (start, end - start))
            self._changed.notify_all()

    def close(self) -> None:
        """Let no caller wait any more: nothing is given back. Harmless when repeated."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def view(self, slot: Slot) -> memoryview:
        """Return the memory of a slot."""
        return memoryview(self._memory)[slot.offset : slot.offset + slot.nbytes]

    def write(self, slot: Slot, start: int, source: memoryview) -> None:
        """Copy ``source`` into a slot. A large copy runs without the interpreter's lock."""
        first = slot.offset + start
        self._bytes[first : first + len(source)] = np.frombuffer(source, dtype=np.uint8)

    def read(self, slot: Slot, start: int, target: memoryview) -> None:
        """Copy a part of a slot into ``target``. A large copy runs without the interpreter's lock."""
        first = slot.offset + start
        np.frombuffer(target, dtype=np.uint8)[:] = self._bytes[first : first + len(target)]

    def _take(self, nbytes: int) -> Slot | None:
        """Take the first free part that is large enough."""
        wanted = _whole_pages(nbytes)
        for index, (offset, free) in enumerate(self._free):
            if free >= wanted:
                self._free[index : index + 1] = [(offset + wanted, free - wanted)] if free > wanted else []
                return Slot(offset, nbytes)
        return None


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
