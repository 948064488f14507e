"""Host memory in pages of one size, copied to and from in runs of neighbouring pages.

An object lies in one run of pages, or in several, in their order. One thread assigns the pages
(:mod:`offload_backend_cpu.free_pages`). The copies may run on other threads, since no two of them share a page.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from offload_backend_cpu.free_pages import FreePages, Run
from offload_core.api import SharedMemory, address_of

PAGE_BYTES = 4096

_LONG_RUN_PAGES = 16
"""Average length from which runs are copied one by one. Shorter runs are copied by one indexed copy of pages."""
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it

Bytes = npt.NDArray[np.uint8]


class Arena:
    """``capacity_bytes`` bytes of host memory, rounded down to whole pages. The system gives a page at its first write.

    Args:
        is_shared: whether other processes are to map the memory. Linux gives such memory in small pages by default
            (``/sys/kernel/mm/transparent_hugepage/shmem_enabled``).

    Attributes:
        pages: the free pages.
        nbytes: the size of the memory.
        address: the address of its first byte.
        shared_memory: the memory, for other processes; ``None`` if it is not shared.

    Raises:
        OSError: the system has not so much memory.
    """

    def __init__(self, capacity_bytes: int, *, is_shared: bool = False) -> None:
        self.pages = FreePages(capacity_bytes // PAGE_BYTES)
        self.nbytes = self.pages.num_pages * PAGE_BYTES
        self.shared_memory: SharedMemory | None = None
        try:
            if is_shared:
                self.shared_memory = SharedMemory.create("offload-cpu", self.nbytes)
                self.view = self.shared_memory.view
            else:
                memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                self.view = memoryview(memory)
        except (OSError, OverflowError) as error:
            code = (error.errno if isinstance(error, OSError) else None) or errno.ENOMEM
            raise OSError(
                code,
                f"{os.strerror(code)}: the system cannot map {self.nbytes} bytes of host memory; lower the tier's "
                f"capacity of {capacity_bytes} bytes",
            ) from error
        if not is_shared:
            # Without these the arena works too, only more slowly. A forked child does not use the memory; while the
            # child lived, every page that is written to would exist twice.
            for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
                with suppress(OSError):
                    memory.madvise(advice)
        self._bytes: Bytes = np.frombuffer(self.view, dtype=np.uint8)
        self._rows = self._bytes.reshape(self.pages.num_pages, PAGE_BYTES)
        self.address: int = self._bytes.ctypes.data
        self._num_resident = 0

    @staticmethod
    def pages_for(nbytes: int) -> int:
        """Return the number of pages for an object of ``nbytes`` bytes; an empty object takes a page too."""
        return max(1, -(-nbytes // PAGE_BYTES))

    def is_resident(self, runs: tuple[Run, ...]) -> bool:
        """Return whether the system has given the memory of ``runs``, so that a write costs a plain copy."""
        return sum(max(runs)) <= self._num_resident

    def mark_resident(self, num_pages: int) -> None:
        """Record that the system has given the first ``num_pages`` pages.

        Threads may call it at once: a lost update costs only some speed.
        """
        self._num_resident = max(self._num_resident, num_pages)

    def populate(self, start_page: int, num_pages: int) -> bool:
        """Make the system give pages now; their content stays. Blocks, without the interpreter's lock.

        Returns:
            False if the system cannot do that (before Linux 5.14); it gives a page at its first write then.

        Raises:
            OSError: the system has not so much memory.
        """
        start = ctypes.c_void_p(self.address + start_page * PAGE_BYTES)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(start, ctypes.c_size_t(num_pages * PAGE_BYTES), _MADV_POPULATE_WRITE) == 0:
            self.mark_resident(start_page + num_pages)
            return True
        code = ctypes.get_errno()
        if code == errno.EINVAL:
            return False
        raise OSError(
            code, f"{os.strerror(code)}: the system did not give {num_pages * PAGE_BYTES} bytes of host memory"
        )

    def make_resident(self, batch: Sequence[tuple[Run, ...]]) -> None:
        """Make the system give the memory of each of these runs now. Blocks.

        The first use of shared memory that the system cannot give kills a process. So it must not be another one's.

        Raises:
            OSError: the system has not so much memory.
        """
        for runs in batch:
            for start, num_pages in runs:
                try:
                    if not self.populate(start, num_pages):
                        self._rows[start : start + num_pages, 0] = 0
                except OSError:
                    self._num_resident = min(self._num_resident, start)
                    raise

    def lent(self, runs: tuple[Run, ...], nbytes: int) -> memoryview | None:
        """Return the first ``nbytes`` bytes of ``runs``, or ``None`` if they are not in one run."""
        start = runs[0][0] * PAGE_BYTES
        return self.view[start : start + nbytes] if len(runs) == 1 else None

    def is_lent(self, runs: tuple[Run, ...], buffer: memoryview) -> bool:
        """Return whether ``buffer`` begins where ``runs`` do, so that it needs no copy."""
        return len(runs) == 1 and bool(buffer) and address_of(buffer) == self.address + runs[0][0] * PAGE_BYTES

    def close(self) -> None:
        """Give the memory up. It stays until nobody uses a view of it."""
        if self.shared_memory is not None:
            self.shared_memory.close()

    def write(self, runs: tuple[Run, ...], source: memoryview) -> None:
        """Copy ``source`` into ``runs``. Runs on any thread; a large copy runs without the interpreter's lock."""
        self._copy(runs, np.frombuffer(source, dtype=np.uint8), into_arena=True)
        # Untouched pages are taken in their order, so the pages before the last are resident too, or soon will be.
        self.mark_resident(sum(max(runs)))

    def read(self, runs: tuple[Run, ...], target: memoryview) -> None:
        """Copy ``runs`` into ``target``. Runs on any thread; a large copy runs without the interpreter's lock."""
        self._copy(runs, np.frombuffer(target, dtype=np.uint8), into_arena=False)

    def _copy(self, runs: tuple[Run, ...], data: Bytes, *, into_arena: bool) -> None:
        """Copy between ``runs`` and ``data``, which may be shorter."""
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
            outside = data[done : done + num_pages * PAGE_BYTES]
            first = start * PAGE_BYTES
            inside = self._bytes[first : first + len(outside)]
            if into_arena:
                inside[:] = outside
            else:
                outside[:] = inside
            done += len(outside)


def _page_numbers(runs: tuple[Run, ...]) -> npt.NDArray[np.intp]:
    """Return the numbers of all pages of ``runs``, in their order."""
    starts, lengths = np.array(runs, dtype=np.intp).T
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()), dtype=np.intp)
