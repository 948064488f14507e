"""The counters and gauges of both halves, which the engine's metrics show."""

from __future__ import annotations

import threading
from collections import defaultdict

COUNTERS = {
    "lookup_hits": "objects that a lookup found",
    "lookup_misses": "objects that a lookup did not find",
    "lookup_failures": "lookups that failed, timed out or were refused under load; they count as misses",
    "lookup_timeouts": "calls of lookups that missed their deadline",
    "lookups_declined": "lookups not begun, because even the deepest hit would take longer than to compute",
    "lookup_wait_seconds": "seconds that requests waited for lookups",
    "loads_declined": "loads not begun, because they were expected to take longer than to compute",
    "load_wait_seconds": "seconds that requests waited for their loads",
    "prefill_seconds_saved": "seconds of prefill saved by complete loads, as estimated from the engine's steps",
    "load_hits": "objects loaded and verified",
    "load_missing": "objects that a lookup found and the load did not",
    "load_corrupt": "objects with a wrong checksum, key or size; they are deleted",
    "load_read_twice": "objects of a shared medium read again, since the first read had a wrong checksum, key or size",
    "load_failures": "objects whose load ended in an error",
    "load_timeouts": "loads that missed their deadline",
    "load_late": "objects that arrived after their load was given up; they are dropped",
    "load_partial": "incomplete loads of which the engine used the objects up to the first gap",
    "backfills": "loads that begin at the end of local full attention, because the engine has evicted the states there",
    "jobs": "jobs begun: a load of one request, or a batch of stores on one tier",
    "jobs_done": "jobs that moved all their objects",
    "jobs_failed": "jobs that did not move all their objects",
    "jobs_timed_out": "jobs that missed their deadline",
    "jobs_cancelled": "jobs that were cancelled, because their request had ended",
    "jobs_retired": "jobs that have ended and released their memory",
    "load_bytes": "bytes loaded and verified, as stored on the medium",
    "load_raw_bytes": "bytes loaded and verified by tiers with compression, after decompression",
    "stores": "objects stored",
    "store_already_present": "objects that were already present",
    "store_rejected": "objects for which a backend had no capacity",
    "store_failures": "objects whose store ended in an error",
    "store_dropped": "objects not stored, because the tier's staging memory was full or the tier was out of use",
    "store_timeouts": "stores of objects that missed their deadline",
    "store_late": "objects that were stored after their deadline",
    "store_declined": "objects not stored, because the tier's write policy excludes them",
    "spares_declined": "spare objects not stored, because the tier had no free capacity or was busy",
    "store_bytes": "bytes stored, as written to the medium",
    "store_raw_bytes": "bytes stored by tiers with compression, before compression",
    "store_uncompressed": "objects stored uncompressed by tiers with compression, because compression saves too little",
    "promotions": "objects loaded from another tier and stored on this one",
    "promotions_dropped": "objects loaded from another tier and not stored, for the reasons of store_dropped",
    "delete_failures": "damaged objects that could not be deleted",
    "io_process_ends": "unasked ends of the tier's I/O process, as each process of the engine counts them",
    "staging_replaced_bytes": "bytes of staging memory in calls of a killed I/O process that was not gone in time",
    "breaker_opened": "pauses of a tier that kept failing; during a pause it gets no calls",
    "breaker_refused": "lookups, loads and stores refused at once during such a pause",
    "events_dropped": "events dropped, because observers were too slow",
    "recomputed_requests": "requests that the engine recomputed after a failed load",
    "estimated_prompt_tokens": "prompt tokens of the requests that the estimated hit ratios come from",
}
"""Every counter's name and meaning."""

GAUGES = {
    "breaker_open": "ranks and schedulers that do not use the tier, or use it on trial only, because it kept failing",
    "draining_leases": "staging leases of calls that have ended for the engine but not yet for the backend",
    "stuck_threads": "threads of the tier that have been in one call for longer than all of its deadlines",
    "capacity_bytes": "configured capacity of the tier; the estimates are for multiples of it",
    "estimated_hit_ratio_half": "estimated hit tokens per prompt token with half the tier's capacity",
    "estimated_hit_ratio": "the same with the tier's own capacity; NaN if the estimate cannot hold so many prompts",
    "estimated_hit_ratio_twice": "the same with twice the capacity",
    "estimated_hit_ratio_four_times": "the same with four times the capacity",
}
"""Every gauge's name and meaning. A gauge is counted up and down; its value is the sum of all changes."""

HIT_RATIO_GAUGES = (
    "estimated_hit_ratio_half",
    "estimated_hit_ratio",
    "estimated_hit_ratio_twice",
    "estimated_hit_ratio_four_times",
)
"""The gauges of the live curve, by rising capacity."""


class Counters:
    """Thread-safe counts by ``(counter, tier)``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], float] = defaultdict(int)

    def add(self, name: str, tier: str, amount: float = 1) -> None:
        """Add ``amount`` to the counter or gauge ``name`` of ``tier``.

        Args:
            name: a key of :data:`COUNTERS` or :data:`GAUGES`.
            tier: the tier's name.
            amount: negative for gauges only; whole unless the counter's name ends in ``seconds``.

        Raises:
            KeyError: there is no counter or gauge ``name``.
        """
        if name not in COUNTERS and name not in GAUGES:
            raise KeyError(f"there is no counter {name!r}; the counters are {', '.join((*COUNTERS, *GAUGES))}")
        if amount:
            with self._lock:
                self._counts[name, tier] += amount

    def take(self) -> dict[tuple[str, str], float]:
        """Return the counts since the last call, and start again from zero. The count of a gauge is its change."""
        with self._lock:
            counts, self._counts = self._counts, defaultdict(int)
        return {key: count for key, count in counts.items() if count}
