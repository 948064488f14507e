"""Running estimate of one tier's seconds: for a lookup, and for a load of some bytes."""

from __future__ import annotations

import time
from collections.abc import Callable

from offload_core.lookup.estimates.corrected_fit import CorrectedFit

_HALVED_AFTER_SECONDS = 300.0
_MIN_SECONDS = 1e-6
_LATENCY_BEFORE_BYTES = (1e-3, 1e-2)
_NEW_LOOKUP_SHARE = 0.2


class LoadSeconds:
    """A latency, and seconds per byte, from the loads that requests waited for.

    The wait for loads that are under way already is a part of it: their bytes are added to those of a new load. A load
    that is under way for longer than expected raises the expectation at once.

    A tier that is not used may have become fast. Its expectation is halved every five minutes without a load. So a
    tier that is a little too slow is tried again soon, and a tier that is far too slow only rarely.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._fit = CorrectedFit(_LATENCY_BEFORE_BYTES, half_life_seconds=_HALVED_AFTER_SECONDS)
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
            self._fit.observe((1.0, all_bytes), max(_MIN_SECONDS, now - begin), now)
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
        expected = self._fit.seconds((1.0, self._bytes_under_way + nbytes), now)
        if self._under_way:
            oldest, _, _ = next(iter(self._under_way.values()))
            return max(expected, now - oldest)
        return expected * _share_after(self._fit.observed_at, now)


def _share_after(observed_at: float | None, now: float) -> float:
    return 1.0 if observed_at is None else 0.5 ** ((now - observed_at) / _HALVED_AFTER_SECONDS)
