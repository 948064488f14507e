"""Host memory in pages of one size, so that objects of any sizes come and go without fragmentation.

An object lies in any pages, in the order of their list. Which pages are whose is for one thread to decide; the copies
may run on others, since no two of them share a page.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt

PAGE_BYTES = 4096

Pages = npt.NDArray[np.intp]


class Arena:
    """``capacity_bytes`` bytes of host memory, rounded down to whole pages.

    The system gives the memory when it is first written to, so pages that were in use before are handed out first.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.num_pages = capacity_bytes // PAGE_BYTES
        memory = mmap.mmap(-1, self.num_pages * PAGE_BYTES)
        with suppress(OSError):  # a kernel without huge pages does as well, more slowly
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._pages = np.frombuffer(memory, dtype=np.uint8).reshape(self.num_pages, PAGE_BYTES)
        self._free: list[int] = []
        self._next_untouched = 0

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return len(self._free) + self.num_pages - self._next_untouched

    @staticmethod
    def pages_for(nbytes: int) -> int:
        """Return how many pages an object of ``nbytes`` bytes takes; an empty one takes a page too."""
        return max(1, -(-nbytes // PAGE_BYTES))

    def take(self, count: int) -> Pages:
        """Take ``count`` pages; there must be so many free ones."""
        reused = self._free[len(self._free) - min(count, len(self._free)) :]
        del self._free[len(self._free) - len(reused) :]
        fresh = count - len(reused)
        assert self._next_untouched + fresh <= self.num_pages, "the caller makes room first"
        self._next_untouched += fresh
        return np.array([*reused, *range(self._next_untouched - fresh, self._next_untouched)], dtype=np.intp)

    def give_back(self, pages: Pages) -> None:
        """Return pages that no copy uses any more."""
        self._free.extend(pages.tolist())

    def write(self, pages: Pages, source: memoryview) -> None:
        """Copy ``source`` into ``pages``. Runs on any thread and without the interpreter's lock."""
        data = np.frombuffer(source, dtype=np.uint8)
        whole = len(data) // PAGE_BYTES
        self._pages[pages[:whole]] = data[: whole * PAGE_BYTES].reshape(whole, PAGE_BYTES)
        if whole < len(pages):
            rest = data[whole * PAGE_BYTES :]
            self._pages[pages[whole], : len(rest)] = rest

    def read(self, pages: Pages, target: memoryview) -> None:
        """Copy ``pages`` into ``target``. Runs on any thread and without the interpreter's lock."""
        data = np.frombuffer(target, dtype=np.uint8)
        whole = len(data) // PAGE_BYTES
        rows = data[: whole * PAGE_BYTES].reshape(whole, PAGE_BYTES)
        np.take(self._pages, pages[:whole], axis=0, out=rows, mode="clip")  # "raise", the default, copies once more
        if whole < len(pages):
            rest = data[whole * PAGE_BYTES :]
            rest[:] = self._pages[pages[whole], : len(rest)]
