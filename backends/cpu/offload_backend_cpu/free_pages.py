"""Which pages of a piece of memory are free, as runs of neighbours. Pure bookkeeping, for one thread.

What is asked for comes in one run wherever there is one: the free run that fits best among pages that were in use
before, else pages that nobody has touched yet, since the system has to find and clear memory for those. Only when no
run is long enough is a request pieced together, from the longest free runs. So nothing is ever refused for being
scattered, and objects of the few sizes that a model has are hardly ever.

Taking and giving back cost a few dictionary entries and a bisection over the distinct lengths of free runs. Of those
there are at most the square root of twice the pages, and in practice a handful.
"""

from __future__ import annotations

from bisect import bisect_left, insort

Run = tuple[int, int]
"""The first of some neighbouring pages, and how many they are. A plain tuple of two numbers, since there may be a
million of them: Python's collector of garbage then passes them over."""


class FreePages:
    """The free ones of ``num_pages`` pages."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.free_pages = num_pages
        """Pages that nobody holds."""
        self._next_untouched = 0
        # The other free pages: runs by where they start and where they end, and the starts of each length.
        self._length_from: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        self._starts_of: dict[int, dict[int, None]] = {}
        self._lengths: list[int] = []

    def take(self, count: int) -> tuple[Run, ...]:
        """Take ``count`` pages, at least one, in as few runs as can be; there must be so many free ones."""
        assert 0 < count <= self.free_pages, "the caller makes room first"
        self.free_pages -= count
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

    def give_back(self, runs: tuple[Run, ...]) -> None:
        """Return pages, which join the free runs beside them."""
        for start, num_pages in runs:
            self.free_pages += num_pages
            end = start + num_pages
            before, after = self._start_before.get(start), self._length_from.get(end)
            if before is not None:
                self._remove(before, start - before)
                start = before
            if after is not None:
                self._remove(end, after)
                end += after
            self._add(start, end - start)

    def _take_from(self, length: int, count: int) -> Run:
        """Take up to ``count`` pages from the front of a free run of ``length``, the one given back last."""
        start, _ = self._starts_of[length].popitem()
        self._starts_of[length][start] = None
        self._remove(start, length)
        taken = min(count, length)
        if taken < length:
            self._add(start + taken, length - taken)
        return start, taken

    def _take_untouched(self, count: int) -> Run:
        self._next_untouched += count
        return self._next_untouched - count, count

    def _add(self, start: int, length: int) -> None:
        self._length_from[start] = length
        self._start_before[start + length] = start
        if length not in self._starts_of:
            self._starts_of[length] = {}
            insort(self._lengths, length)
        self._starts_of[length][start] = None

    def _remove(self, start: int, length: int) -> None:
        del self._length_from[start]
        del self._start_before[start + length]
        starts = self._starts_of[length]
        del starts[start]
        if not starts:
            del self._starts_of[length]
            del self._lengths[bisect_left(self._lengths, length)]
