"""A shared memory in the child's address space, whose pages the child maps before it writes files from them."""

from __future__ import annotations

import mmap

_REGION_BYTES = 16 * mmap.PAGESIZE


class MappedMemory:
    """Shared memory of the parent. Several threads may use it.

    Attributes:
        view: all of its bytes.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        self.view = memoryview(mapping)
        self._is_touched = bytearray(len(self.view) // _REGION_BYTES + 1)
        """One flag per region."""

    def touch(self, start: int, nbytes: int) -> None:
        """Read a byte of each page of the part, unless this was done before.

        If a process writes a file from pages that it has never touched, the page cache of Linux 6.18 gets small folios.
        Then later loads are slower.
        """
        first = start // _REGION_BYTES
        end = min(-(-(start + nbytes) // _REGION_BYTES), len(self._is_touched))
        if self._is_touched.find(0, first, end) >= 0:
            self.view[first * _REGION_BYTES : end * _REGION_BYTES : mmap.PAGESIZE].tobytes()
            self._is_touched[first:end] = b"\1" * (end - first)
