"""The free pages of a piece of memory, as runs of neighbours. Pure bookkeeping, for one thread.

A request gets one run if any is long enough. The best fit among pages that were in use before comes first. Untouched
pages come second, because the system has to find and clear memory for them. If no run is long enough, the request is
pieced together from the longest free runs. So fragmentation never refuses a request, and hardly ever scatters objects
of the few sizes that a model has.

A take or a release costs a few dictionary entries and a bisection over the distinct lengths of free runs. There are at
most as many lengths as the square root of twice the pages, and in practice a handful.
"""

from __future__ import annotations

from bisect import bisect_left, insort

Run = tuple[int, int]
"""The first of some neighbouring pages, and their count.

There may be a million runs. A plain tuple of two numbers is ignored by Python's garbage collector."""


class FreePages:
    """The free ones of ``num_pages`` pages.

    Attributes:
        num_pages: all pages.
        num_free: the free ones among them.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self._next_untouched = 0
        # The other free pages: the length of each run by its start, its start by its end, and the starts by length.
        self._length_at: dict[int, int] = {}
        self._start_by_end: dict[int, int] = {}
        self._starts_by_length: dict[int, dict[int, None]] = {}
        self._lengths: list[int] = []

    def take(self, count: int) -> tuple[Run, ...]:
        """Take ``count`` pages, at least one, in as few runs as possible; so many must be free."""
        assert 0 < count <= self.num_free, "the caller evicts first"
        self.num_free -= count
        index = bisect_left(self._lengths, count)
        if index < len(self._lengths):
            return (self._take_from(self._lengths[index], count),)
        if count <= self.num_pages - self._next_untouched:
            return (self._take_untouched(count),)
        runs: list[Run] = []
        while count and self._lengths:
            runs.append(self._take_from(self._lengths[-1], count))
            count -= runs[-1][1]
        if count:
            runs.append(self._take_untouched(count))
        return tuple(runs)

    def release(self, runs: tuple[Run, ...]) -> None:
        """Release pages, which join the free runs beside them."""
        for start, num_pages in runs:
            self.num_free += num_pages
            end = start + num_pages
            before, after = self._start_by_end.get(start), self._length_at.get(end)
            if before is not None:
                self._remove(before, start - before)
                start = before
            if after is not None:
                self._remove(end, after)
                end += after
            self._add(start, end - start)

    def _take_from(self, length: int, count: int) -> Run:
        """Take up to ``count`` pages from the front of a free run of ``length``, the one released last."""
        start, _ = self._starts_by_length[length].popitem()
        self._starts_by_length[length][start] = None
        self._remove(start, length)
        taken = min(count, length)
        if taken < length:
            self._add(start + taken, length - taken)
        return start, taken

    def _take_untouched(self, count: int) -> Run:
        self._next_untouched += count
        return self._next_untouched - count, count

    def _add(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_by_end[start + length] = start
        if length not in self._starts_by_length:
            self._starts_by_length[length] = {}
            insort(self._lengths, length)
        self._starts_by_length[length][start] = None

    def _remove(self, start: int, length: int) -> None:
        del self._length_at[start]
        del self._start_by_end[start + length]
        starts = self._starts_by_length[length]
        del starts[start]
        if not starts:
            del self._starts_by_length[length]
            del self._lengths[bisect_left(self._lengths, length)]
