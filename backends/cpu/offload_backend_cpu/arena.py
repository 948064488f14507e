"""Host memory in pages of one size, copied to and from in runs of neighbouring pages.

An object lies in one run of pages, or in several, in their order. Which pages are whose is for one thread to decide
(:mod:`offload_backend_cpu.free_pages`); the copies may run on others, since no two of them share a page.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from offload_backend_cpu.free_pages import FreePages, Run

PAGE_BYTES = 4096

_LONG_RUN_PAGES = 16
"""From this average length on runs are copied one by one; a copy of shorter ones is one indexed copy by pages."""
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it

Bytes = npt.NDArray[np.uint8]


class Arena:
    """``capacity_bytes`` bytes of host memory, rounded down to whole pages. The system gives it as it is written to."""

    def __init__(self, capacity_bytes: int) -> None:
        self.pages = FreePages(capacity_bytes // PAGE_BYTES)
        self.nbytes = self.pages.num_pages * PAGE_BYTES
        memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A kernel without one of these does as well, more slowly. A forked child has no use for the memory, and while
        # it lived every page written to would be there twice.
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            with suppress(OSError):
                memory.madvise(advice)
        self._bytes: Bytes = np.frombuffer(memory, dtype=np.uint8)
        self._rows = self._bytes.reshape(self.pages.num_pages, PAGE_BYTES)
        self.address: int = self._bytes.ctypes.data
        """Where the memory starts."""
        self._there_pages = 0

    @staticmethod
    def pages_for(nbytes: int) -> int:
        """Return how many pages an object of ``nbytes`` bytes takes; an empty one takes a page too."""
        return max(1, -(-nbytes // PAGE_BYTES))

    def is_there(self, runs: tuple[Run, ...]) -> bool:
        """Whether the system has given the memory of ``runs``, so that writing to it costs a plain copy."""
        return sum(max(runs)) <= self._there_pages

    def note_there(self, num_pages: int) -> None:
        """Note that the system has given the first ``num_pages`` pages. On any thread: a lost note costs some speed."""
        self._there_pages = max(self._there_pages, num_pages)

    def populate(self, start_page: int, num_pages: int) -> bool:
        """Have the system give pages now; what they hold stays. Blocks, without the interpreter's lock.

        Returns whether it did; a system that cannot (before Linux 5.14) gives memory when it is written to.

        Raises:
            OSError: there is not so much memory.
        """
        start = ctypes.c_void_p(self.address + start_page * PAGE_BYTES)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(start, ctypes.c_size_t(num_pages * PAGE_BYTES), _MADV_POPULATE_WRITE) == 0:
            self.note_there(start_page + num_pages)
            return True
        code = ctypes.get_errno()
        if code == errno.EINVAL:
            return False
        raise OSError(code, f"{os.strerror(code)}: {num_pages * PAGE_BYTES} bytes of host memory could not be had")

    def write(self, runs: tuple[Run, ...], source: memoryview) -> None:
        """Copy ``source`` into ``runs``. Runs on any thread; what is large, without the interpreter's lock."""
        self._copy(runs, np.frombuffer(source, dtype=np.uint8), into_arena=True)
        # Untouched pages are handed out in their order, so those before the last are there too, or soon will be.
        self.note_there(sum(max(runs)))

    def read(self, runs: tuple[Run, ...], target: memoryview) -> None:
        """Copy ``runs`` into ``target``. Runs on any thread; what is large, without the interpreter's lock."""
        self._copy(runs, np.frombuffer(target, dtype=np.uint8), into_arena=False)

    def _copy(self, runs: tuple[Run, ...], data: Bytes, *, into_arena: bool) -> None:
        """Copy between ``runs`` and ``data``, which may end before them."""
        whole = len(data) // PAGE_BYTES
        if len(runs) > 1 and whole < len(runs) * _LONG_RUN_PAGES:
            pages = _page_numbers(runs)
            rows = data[: whole * PAGE_BYTES].reshape(whole, PAGE_BYTES)
            if into_arena:
                self._rows[pages[:whole]] = rows
            else:  # mode "raise", the default, would copy once more
                np.take(self._rows, pages[:whole], axis=0, out=rows, mode="clip")
            runs = ((int(pages[-1]), 1),)
            data = data[whole * PAGE_BYTES :]
        done = 0
        for start, num_pages in runs:
            theirs = data[done : done + num_pages * PAGE_BYTES]
            first = start * PAGE_BYTES
            ours = self._bytes[first : first + len(theirs)]
            if into_arena:
                ours[:] = theirs
            else:
                theirs[:] = ours
            done += len(theirs)


def _page_numbers(runs: tuple[Run, ...]) -> npt.NDArray[np.intp]:
    """Return the numbers of all pages of ``runs``, in their order."""
    starts, lengths = np.array(runs, dtype=np.intp).T
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()), dtype=np.intp)
