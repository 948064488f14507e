"""Counters and gauges that both halves keep and the engine's metrics show."""

from __future__ import annotations

import threading
from collections import Counter

COUNTERS = {
    "lookup_hits": "objects that a lookup found",
    "lookup_misses": "objects that a lookup did not find",
    "lookup_failures": "lookups that ended in an error, shed or timed out; they count as misses",
    "lookup_timeouts": "calls of a lookup that were not answered at its deadline",
    "load_hits": "objects loaded and verified",
    "load_missing": "objects that a lookup found and the load did not",
    "load_corrupt": "objects whose checksum, key or size was wrong; they are deleted",
    "load_failures": "objects whose load ended in an error",
    "load_timeouts": "loads that were not finished at their deadline",
    "load_late": "objects that arrived after nobody wanted them any more; they are dropped",
    "load_partial": "loads that were not done and of which the engine used what had come, up to the first gap",
    "jobs": "loads of a request, and batches to store on one tier, that were begun",
    "jobs_done": "jobs that were done in full",
    "jobs_failed": "jobs of which something was not moved",
    "jobs_timed_out": "jobs that were not done at their deadline",
    "jobs_cancelled": "jobs that nobody wanted any more",
    "jobs_retired": "jobs that have ended and hold no memory",
    "load_bytes": "bytes loaded and verified, as the medium has them",
    "load_raw_bytes": "bytes loaded and verified by tiers with compression, after decompressing",
    "stores": "objects stored",
    "store_already_present": "objects that were there already",
    "store_rejected": "objects that a backend had no room for",
    "store_failures": "objects whose store ended in an error",
    "store_dropped": "objects not stored: staging memory, or the tier's share of it, was full, or the tier not used",
    "store_timeouts": "objects that were not stored at their deadline",
    "store_late": "objects of these that were stored after all",
    "store_declined": "objects not stored because the tier's write policy left them out",
    "store_bytes": "bytes stored, as the medium has them",
    "store_raw_bytes": "bytes stored by tiers with compression, before compressing",
    "store_uncompressed": "objects stored as they are by tiers with compression, since it does not pay for them",
    "promotions": "objects kept that were loaded from another tier",
    "promotions_dropped": "objects loaded from another tier and not kept, for the same reasons as store_dropped",
    "delete_failures": "damaged objects that could not be deleted",
    "breaker_opened": "how often a tier that kept failing was given a pause in which nothing is asked of it",
    "breaker_refused": "lookups, loads and stores refused at once because the tier had such a pause",
    "events_dropped": "events that observers were too slow for",
    "recomputed_requests": "requests whose load failed and that the engine recomputed",
}
"""Every counter's name and meaning."""

GAUGES = {
    "breaker_open": "ranks and schedulers in which the tier is not used, or only on trial, because it kept failing",
    "draining_leases": "staging leases of loads and stores that are over for the engine and not for the backend",
    "stuck_threads": "threads of the tier that are in one call for longer than any of its deadlines",
}
"""Every gauge's name and meaning. They are counted up and down, and the sum is what holds."""


class Counters:
    """Thread-safe counts by ``(counter, tier)``; ``take`` hands over what came since the last call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, tier: str, amount: int = 1) -> None:
        """Count ``amount`` more of ``name``, a key of :data:`COUNTERS`, or of :data:`GAUGES`, for ``tier``.

        Only gauges go down.
        """
        if name not in COUNTERS and name not in GAUGES:
            raise KeyError(f"unknown counter {name!r}; known: {', '.join((*COUNTERS, *GAUGES))}")
        if amount:
            with self._lock:
                self._counts[name, tier] += amount

    def take(self) -> dict[tuple[str, str], int]:
        """Return the counts since the last call and start again from zero; for a gauge that is its change."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return {key: count for key, count in counts.items() if count}
