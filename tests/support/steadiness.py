"""Checks of a process after a long time: waits within deadlines, jobs that add up, and memory that does not grow."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

DEADLINES_OF_WAITS = {"lookups": 2, "loads": 1, "kept_back": 1}
"""The deadlines that end each kind of wait. One ends lookups, another the wait for another request's load."""
VERDICTS = ("jobs_done", "jobs_failed", "jobs_timed_out", "jobs_cancelled")
"""Counters of how jobs end; each job ends in exactly one of these ways."""
AT_REST_ZERO = ("draining_leases", "breaker_open", "stuck_threads", "pending_loads", "pending_stores")
"""Gauges that are zero while the engine is idle and the medium works."""

_METRIC = re.compile(r'vllm:hybrid_offload_(\w+?)(?:_total)?\{.*?tier="([^"]*)"')


class MemorySample(NamedTuple):
    """Resident memory of a process at one moment; pages of mapped files may be left out, the kernel can drop them."""

    seconds: float
    rss_bytes: int


class MemoryTrend(NamedTuple):
    """A line through samples."""

    bytes_per_second: float
    growth_bytes: float
    """Growth along the line, from the first sample to the last."""
    seconds: float


def memory_trend(samples: Sequence[MemorySample], warm_up_seconds: float) -> MemoryTrend:
    """Fit a line to the samples after the warm-up, by the median of all slopes; single peaks do not change it.

    Raises:
        ValueError: fewer than three samples are left.
    """
    kept = [sample for sample in samples if sample.seconds >= warm_up_seconds]
    if len(kept) < 3:
        raise ValueError(f"{len(kept)} samples after {warm_up_seconds:g} s of warm-up; at least 3 make a trend")
    slopes = [
        (late.rss_bytes - early.rss_bytes) / (late.seconds - early.seconds)
        for index, early in enumerate(kept)
        for late in kept[index + 1 :]
        if late.seconds > early.seconds
    ]
    slope, seconds = statistics.median(slopes), kept[-1].seconds - kept[0].seconds
    return MemoryTrend(slope, slope * seconds, seconds)


def wait_problems(
    waits: Mapping[str, Mapping[str, float]], deadlines_seconds: float, allowance_seconds: float
) -> list[str]:
    """Return one line for each request that waited too long for storage.

    The engine notices a deadline only between two steps. So a wait may exceed each of its deadlines by a step.

    Args:
        waits: per request, the fields of :class:`tests.support.engine.waiting.StorageWait`.
        deadlines_seconds: the deadlines of a lookup and a load together.
        allowance_seconds: the extra time for a machine that is busy with other work.
    """
    lines: list[str] = []
    for request_id, wait in waits.items():
        waited = sum(wait[kind] for kind in DEADLINES_OF_WAITS)
        deadlines = sum(number for kind, number in DEADLINES_OF_WAITS.items() if wait[kind])
        limit = deadlines_seconds + deadlines * wait["longest_step"]
        if waited > limit + allowance_seconds:
            fields = ", ".join(f"{name} {value:.3g}" for name, value in wait.items())
            lines.append(f"{request_id} waited {waited:.3f} s, more than {limit:.3f} s ({fields})")
    return lines


def counter_problems(metrics: Mapping[str, float]) -> list[str]:
    """Return one line for each contradiction in the metrics of an idle engine whose media work.

    Args:
        metrics: the metrics of a :class:`tests.support.engine.spec.RunResult`.
    """
    by_tier: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for name, value in metrics.items():
        if found := _METRIC.match(name):
            by_tier[found[2]][found[1]] = value
    lines: list[str] = []
    for tier, counts in by_tier.items():
        jobs, retired = counts.get("jobs", 0), counts.get("jobs_retired", 0)
        ends = {name: counts.get(name, 0) for name in VERDICTS}
        if not jobs == sum(ends.values()) == retired:
            lines.append(f"tier {tier!r}: {jobs:g} jobs, {retired:g} retired, ended: {ends}")
        lines += [f"tier {tier!r}: {name} is {counts[name]:g}" for name in AT_REST_ZERO if counts.get(name)]
    return lines
