"""The counters, gauges and histograms of both halves, which the engine's metrics show."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import repeat

ALL_TIERS = "all"
"""The tier of counts that belong to no single one."""

COUNTERS = {
    "queries": "lookups of a request's prefix on the tier, those included that it did not answer",
    "query_hits": "lookups to which the tier had more of the prefix than the engine",
    "query_misses": "lookups to which the tier had no more of the prefix than the engine",
    "hit_tokens": "prompt tokens that complete loads brought",
    "lookup_hits": "objects that a lookup found",
    "lookup_misses": "objects that a lookup did not find",
    "lookup_failures": "lookups that failed, timed out or were refused under load; they count as misses",
    "lookup_timeouts": "calls of lookups that missed their deadline",
    "lookups_declined": "lookups not begun, because even the deepest hit would take longer than to compute",
    "lookup_wait_seconds": "seconds that requests waited for lookups",
    "loads_declined": "loads not begun, because they were expected to take longer than to compute",
    "load_wait_seconds": "seconds that requests waited for their loads",
    "prefill_seconds_saved": "seconds of prefill saved by complete loads, as estimated from the engine's steps",
    "load_hits": "objects loaded and verified; one that is damaged in lent memory may be in load_corrupt too",
    "load_lent": "objects among these that were copied from the tier's own memory, without staging memory",
    "load_kept": "objects copied within a step from memory lent for an earlier load; they are not among load_hits",
    "load_missing": "objects that a lookup found and the load did not",
    "load_corrupt": "objects with a wrong checksum, key or size; they are deleted",
    "load_read_twice": "objects of a shared medium read again, since the first read had a wrong checksum, key or size",
    "load_failures": "objects whose load ended in an error",
    "load_timeouts": "loads that missed their deadline",
    "load_late": "objects that arrived after their load was given up; they are dropped",
    "load_partial": "incomplete loads of which the engine used the objects up to the first gap",
    "backfills": "loads that begin at the end of local full attention, because the engine has evicted the states there",
    "loads_within_step": "loads within the step that runs their request, so that the request did not wait for them",
    "jobs": "jobs begun: a load of one request, or a batch of stores on one tier",
    "jobs_done": "jobs that moved all their objects",
    "jobs_failed": "jobs that did not move all their objects",
    "jobs_timed_out": "jobs that missed their deadline",
    "jobs_cancelled": "jobs that were cancelled, because their request had ended",
    "jobs_retired": "jobs that have ended and released their memory",
    "load_bytes": "bytes loaded and verified, as stored on the medium",
    "load_raw_bytes": "bytes loaded and verified by tiers with compression, after decompression",
    "stores": "objects stored",
    "store_lent": "objects copied to memory that the tier has lent for them, without staging memory",
    "store_already_present": "objects that were already present",
    "store_rejected": "objects for which a backend had no capacity",
    "store_failures": "objects whose store ended in an error",
    "store_dropped": "objects not stored: staging memory or the device's buffer was full, or the tier out of use",
    "store_blocks_reused": "chunks that waited for room until the engine had reused their blocks",
    "store_timeouts": "stores of objects that missed their deadline",
    "store_late": "objects that were stored after their deadline",
    "store_declined": "objects not stored, because the tier's write policy excludes them",
    "spares_declined": "spare objects not stored, because the tier had no free capacity or was busy",
    "store_bytes": "bytes stored, as written to the medium",
    "store_raw_bytes": "bytes stored by tiers with compression, before compression",
    "store_uncompressed": "objects stored uncompressed by tiers with compression, because compression saves too little",
    "promotions": "objects loaded from another tier and stored on this one",
    "promotions_dropped": "objects loaded from another tier and not stored, for the reasons of store_dropped",
    "hints_accepted": "actions of KV hints that the engine acts on",
    "hints_refused": "actions of KV hints that the engine refused, and envelopes that it could not read",
    "evictions": "objects that the backend evicted for stores of this engine",
    "evictions_unread": "objects that this engine stored and never loaded before the backend evicted them",
    "evictions_unread_bytes": "bytes of the objects of evictions_unread, as written to the medium",
    "delete_failures": "damaged objects that could not be deleted",
    "io_process_ends": "unasked ends of the tier's I/O process, as each process of the engine counts them",
    "staging_replaced_bytes": "bytes of staging memory in calls of a killed I/O process that was not gone in time",
    "breaker_opened": "pauses of a tier that kept failing; during a pause it gets no calls",
    "breaker_refused": "lookups, loads and stores refused at once during such a pause",
    "events_dropped": "events dropped, because observers were too slow or had no thread",
    "recomputed_requests": "requests that the engine recomputed after a failed load",
    "estimated_prompt_tokens": "prompt tokens of the requests that the estimated hit ratios come from",
}
"""Every counter's name and meaning."""

GAUGES = {
    "breaker_open": "ranks and schedulers that do not use the tier, or use it on trial only, because it kept failing",
    "pending_loads": "requests that wait for their load",
    "pending_stores": "objects on their way to the tier, with those of calls past their deadline",
    "draining_leases": "staging leases of calls that have ended for the engine but not yet for the backend",
    "stuck_threads": "threads of the tier that have been in one call for longer than all of its deadlines",
    "retained_bytes": "bytes that KV hints protect from eviction, if a tier has all of their objects",
    "capacity_bytes": "configured capacity of the tier; the estimates are for multiples of it",
    "estimated_hit_ratio_half": "estimated hit tokens per prompt token with half the tier's capacity",
    "estimated_hit_ratio": "the same with the tier's own capacity; NaN if the estimate cannot hold so many prompts",
    "estimated_hit_ratio_twice": "the same with twice the capacity",
    "estimated_hit_ratio_four_times": "the same with four times the capacity",
}
"""Every gauge's name and meaning. A gauge is counted up and down; its value is the sum of all changes."""

CONNECTOR_COUNTERS = {
    "queries": "requests that the connector was asked about; a preempted request counts again",
    "query_hits": "queries to which the connector offered tokens, loaded or not",
    "query_misses": "queries to which it offered none, and those that it answered with an error or too late",
    "query_timeouts": "queries among the misses that the connector did not decide in time",
    "query_errors": "questions to the connector that raised an error; a request may ask several times",
    "hit_tokens": "prompt tokens that loads from the connector brought",
    "load_failures": "loads from the connector that failed",
}
"""The counters of each connector of a ``WeightedMultiConnector``."""

CONNECTOR_GAUGES = {"pending_loads": "requests that wait for their load from the connector"}
"""The gauges of each connector of a ``WeightedMultiConnector``."""

HIT_RATIO_GAUGES = (
    "estimated_hit_ratio_half",
    "estimated_hit_ratio",
    "estimated_hit_ratio_twice",
    "estimated_hit_ratio_four_times",
)
"""The gauges of the live curve, by rising capacity."""

HISTOGRAMS = {
    "lookup_seconds": "duration of the calls that look objects up, failed ones included",
    "load_seconds": "duration of the calls that load objects, failed ones included",
    "load_queue_seconds": "wait of loads for their calls, one value per call",
    "store_seconds": "duration of the calls that store objects, failed ones included",
    "store_queue_seconds": "wait of stores for their calls, one value per batch",
}
"""Every histogram's name and meaning. All of them have the same buckets."""

BUCKET_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""The upper bounds of all buckets but the last, which has none."""

_BUCKETS = {name: tuple(f"{name}:{number}" for number in range(len(BUCKET_SECONDS) + 1)) for name in HISTOGRAMS}
_SUMS = {name: tuple(f"{bucket}:sum" for bucket in buckets) for name, buckets in _BUCKETS.items()}


class Counters:
    """Thread-safe counts by ``(counter, tier)``, and histograms.

    A histogram is two counts for each bucket with values: their number is ``name:bucket``, their sum is
    ``name:bucket:sum``. So reports of halves and of ranks add up like those of counters.

    Args:
        counters: the names and meanings of the counters.
        gauges: the names and meanings of the gauges.
    """

    def __init__(self, counters: Mapping[str, str] = COUNTERS, gauges: Mapping[str, str] = GAUGES) -> None:
        self._counters = counters
        self._gauges = gauges
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], float] = defaultdict(int)
        self._values: dict[tuple[str, str], float] = defaultdict(int)

    def add(self, name: str, tier: str, amount: float = 1) -> None:
        """Add ``amount`` to the counter or gauge ``name`` of ``tier``.

        Args:
            name: the name of a counter or gauge.
            tier: the tier's name.
            amount: negative for gauges only; whole unless the counter's name ends in ``seconds``.

        Raises:
            KeyError: there is no counter or gauge ``name``.
            ValueError: ``amount`` would lower a counter.
        """
        if name not in self._counters and name not in self._gauges:
            known = ", ".join((*self._counters, *self._gauges))
            raise KeyError(f"there is no counter {name!r}; the counters are {known}")
        if amount < 0 and name in self._counters:
            raise ValueError(f"counter {name!r} of tier {tier!r} cannot go down by {-amount}; only a gauge can")
        if amount:
            with self._lock:
                self._counts[name, tier] += amount

    def observe(self, name: str, tier: str, seconds: float) -> None:
        """Add a value to the histogram ``name`` of ``tier``.

        Args:
            name: a key of :data:`HISTOGRAMS`.
            tier: the tier's name.
            seconds: 0 or more.

        Raises:
            KeyError: there is no histogram ``name``.
            ValueError: ``seconds`` is negative or not a number.
        """
        if name not in _BUCKETS:
            raise KeyError(f"there is no histogram {name!r}; the histograms are {', '.join(HISTOGRAMS)}")
        if not 0 <= seconds < math.inf:
            raise ValueError(f"{name} of tier {tier!r} cannot be {seconds}; it must be 0 or more")
        number = bisect_left(BUCKET_SECONDS, seconds)
        with self._lock:
            self._values[_BUCKETS[name][number], tier] += 1
            self._values[_SUMS[name][number], tier] += seconds

    def take(self) -> dict[tuple[str, str], float]:
        """Return the counts since the last call, and start again from zero. The count of a gauge is its change."""
        if not self._counts:
            return {}
        with self._lock:
            counts, self._counts = self._counts, defaultdict(int)
        return {key: count for key, count in counts.items() if count}

    def take_histograms(self) -> dict[tuple[str, str], float]:
        """Return the counts of the histograms' buckets since the last call, and start again from zero."""
        if not self._values:
            return {}
        with self._lock:
            values, self._values = self._values, defaultdict(int)
        return dict(values)


def single_values(counts: Mapping[tuple[str, str], float]) -> Iterator[tuple[str, str, float]]:
    """Yield the values of the histograms in a report, for metrics that take one value after the other.

    They have the same buckets and sums as the observed values.

    Args:
        counts: as :meth:`Counters.take_histograms` returns them; other counts are left out.

    Yields:
        The histogram's name, the tier, and the mean of the values of one bucket, once for each of them.
    """
    for (name, tier), count in counts.items():
        metric, _, bucket = name.partition(":")
        if bucket.isdecimal():
            value = value_in_bucket(int(bucket), count, counts[f"{name}:sum", tier])
            yield from repeat((metric, tier, value), int(count))


def value_in_bucket(bucket: int, count: float, total: float) -> float:
    """Return the mean of the values in a histogram's bucket. It is inside the bucket, however their sum was rounded."""
    least = math.nextafter(BUCKET_SECONDS[bucket - 1], math.inf) if bucket else 0.0
    most = BUCKET_SECONDS[bucket] if bucket < len(BUCKET_SECONDS) else math.inf
    return min(max(total / count, least), most)
