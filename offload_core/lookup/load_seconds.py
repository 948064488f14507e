"""Running estimate of one tier's seconds: for a lookup, and for a load of some bytes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from offload_core.lookup.running_fit import HALF_LIFE_SECONDS, RunningFit

_HALVED_AFTER_SECONDS = 300.0
_MIN_SECONDS = 1e-6
_LATENCY_BEFORE_BYTES = (1e-3, 1e-2)
_NEW_LOOKUP_SHARE = 0.2
_SIZES_PER_DOUBLING = 4
_NEW_LOAD_SHARE = 0.5
_MOST_TIMES_EXPECTED = 10.0


class _SizeClass(NamedTuple):
    """Loads of about one size: their seconds, and the time of the last one."""

    nbytes: int
    seconds: float
    observed_at: float


class LoadSeconds:
    """A latency, and seconds per byte, from the loads that requests waited for.

    A load is several calls, of which some run at once, so its seconds grow in stairs. So recent loads of about the same
    size count more than the line through all sizes: a minute after the last of them, both count alike.

    The wait for loads that are under way already is a part of it: their bytes are added to those of a new load. A load
    that is under way for longer than expected raises the expectation at once.

    A tier that is not used may have become fast. Its expectation is halved every five minutes without a load. So a
    tier that is a little too slow is tried again soon, and a tier that is far too slow only rarely.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._fit = RunningFit(_LATENCY_BEFORE_BYTES)
        self._of_size: dict[int, _SizeClass] = {}
        self._under_way: dict[int, tuple[float, int, int]] = {}
        """Per job: begin, own bytes, and own bytes with those that were under way."""
        self._bytes_under_way = 0
        self._lookup_seconds = 0.0
        self._looked_up_at: float | None = None

    def load_begins(self, job_id: int, nbytes: int) -> None:
        """Note the begin of a load."""
        self._bytes_under_way += nbytes
        self._under_way[job_id] = (self._clock(), nbytes, self._bytes_under_way)

    def load_ends(self, job_id: int, *, measured: bool) -> float:
        """Note the end of a load; returns its seconds. A load that is not under way has none.

        Args:
            measured: whether its seconds are those of a load. A cancelled load says nothing.
        """
        if job_id not in self._under_way:
            return 0.0
        begin, nbytes, all_bytes = self._under_way.pop(job_id)
        self._bytes_under_way -= nbytes
        now = self._clock()
        if measured:
            self._observe(all_bytes, max(_MIN_SECONDS, now - begin), now)
        return now - begin

    def lookup_ended(self, seconds: float, *, answered: bool) -> None:
        """Note the seconds of a lookup.

        Args:
            answered: whether the tier has answered. If not, a lookup is expected to take twice these seconds or more.
                Else a request would wait for the next one just as long, and again in vain.
        """
        if not answered:
            if 2 * seconds <= self._lookup_seconds:
                return
            self._lookup_seconds = 2 * seconds
        elif self._looked_up_at is None:
            self._lookup_seconds = seconds
        else:
            self._lookup_seconds += _NEW_LOOKUP_SHARE * (seconds - self._lookup_seconds)
        self._looked_up_at = self._clock()

    def lookup_seconds(self) -> float:
        """Return the expected seconds of a lookup; zero before the first one."""
        return self._lookup_seconds * _share_after(self._looked_up_at, self._clock())

    def seconds(self, nbytes: int) -> float:
        """Return the expected seconds of a load of ``nbytes`` that begins now; zero before the first one."""
        now = self._clock()
        all_bytes = self._bytes_under_way + nbytes
        expected = self._expected(all_bytes, now)
        if self._under_way:
            oldest, _, _ = next(iter(self._under_way.values()))
            return max(expected, now - oldest)
        return expected * _share_after(self._fit.observed_at, now)

    def _observe(self, nbytes: int, seconds: float, now: float) -> None:
        seconds = min(seconds, _MOST_TIMES_EXPECTED * (self._expected(nbytes, now) or seconds))
        self._fit.observe((1.0, nbytes), seconds, now)
        before = self._of_size.get(_size_class(nbytes))
        if before is not None:
            old = (1 - _NEW_LOAD_SHARE) * _weight(before, now)
            seconds += old * (self._at_size(nbytes, before) - seconds)
        self._of_size[_size_class(nbytes)] = _SizeClass(nbytes, seconds, now)

    def _expected(self, nbytes: int, now: float) -> float:
        line = self._fit.seconds((1.0, nbytes))
        loads = self._of_size.get(_size_class(nbytes))
        return line if loads is None else line + _weight(loads, now) * (self._at_size(nbytes, loads) - line)

    def _at_size(self, nbytes: int, loads: _SizeClass) -> float:
        """Return the seconds of a class, for a load of not quite its size."""
        line = self._fit.seconds((1.0, loads.nbytes))
        return loads.seconds * self._fit.seconds((1.0, nbytes)) / line if line > 0 else loads.seconds


def _size_class(nbytes: int) -> int:
    return round(_SIZES_PER_DOUBLING * math.log2(max(1, nbytes)))


def _weight(loads: _SizeClass, now: float) -> float:
    return math.pow(0.5, (now - loads.observed_at) / HALF_LIFE_SECONDS)


def _share_after(observed_at: float | None, now: float) -> float:
    return 1.0 if observed_at is None else 0.5 ** ((now - observed_at) / _HALVED_AFTER_SECONDS)
