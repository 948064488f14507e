"""Findings: a plot's title in one sentence, computed from the results so that it stays true after a renewal."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.reporting.rows import (
    Backends,
    Codecs,
    Compression,
    CpuMemory,
    Crossover,
    DiskCapacity,
    DiskScan,
    Faults,
    LMCacheConnector,
    Scheduler,
    Ttft,
)
from benchmarks.reporting.tables import cold_lookups, ours, tokens


def span(numbers: Iterable[float], form: str = ".2f") -> str:
    """Return the range of the numbers, or the number if they are equal."""
    found = list(numbers)
    low, high = f"{min(found):{form}}", f"{max(found):{form}}"
    return low if low == high else f"{low} to {high}"


def ttft(results: Ttft) -> str:
    """Compare a load from a cold disk with recompute and with the local prefix cache."""
    p50 = {row.name: row.p50_ms for row in results.first_tokens}
    cold = p50["disk, cold"]
    return (
        f"From a cold disk the first token comes {p50['recompute'] / cold:.0f} times sooner than by recompute; "
        f"it takes {cold / p50['local prefix cache']:.2f} times as long as from the local prefix cache"
    )


def lmcache_connector(results: LMCacheConnector) -> str:
    """Compare the loads of LMCache's connector with ours."""
    speeds = [row.speed_beside_lmcache for row in results.first_tokens if row.speed_beside_lmcache is not None]
    if not speeds:
        return "Loads by our tier from an LMCache server are too short here for a comparison with LMCache's connector"
    return (
        f"LMCache's own connector takes {span(speeds, '.1f')} times as long as our tier to load from an LMCache server"
    )


def crossover(results: Crossover) -> str:
    """Compare ours with the better of loading and computing, and with the worse."""
    aim, rows = 1.05, results.rows
    spared = max(max(row.compute_p50_ms, row.load_p50_ms) / row.ours_p50_ms for row in rows)
    return (
        f"In {sum(row.ratio <= aim for row in rows)} of {len(rows)} cases the first token comes within {aim} times the "
        f"better of load and compute (worst: {max(row.ratio for row in rows):.2f}); the other choice costs up to "
        f"{spared:.0f} times as much"
    )


def scheduler(results: Scheduler) -> str:
    """Compare the engine thread's time with the stock connector's on the longest and on the shortest prompts."""
    rows = cold_lookups(results)
    shortest, longest = min(row.tokens for row in rows), max(row.tokens for row in rows)
    short, long = (
        span((1 / row.engine_ratio for row in rows if row.tokens == length), ".1f") for length in (shortest, longest)
    )
    index = " with an index of host memory" if results.medium == "own" else ""
    return (
        f"A first lookup of {tokens(longest)} tokens{index} costs stock {long} times our time on the engine's thread, "
        f"one of {tokens(shortest)} tokens {short} times"
    )


def backends(results: Backends) -> str:
    """Compare stores and loads of the disk backend with those of vLLM's helpers."""
    rows = [row for row in ours(results.speed) if row.backend == "disk"]
    stores, loads = (
        span(row.vllm_ratio or 0 for row in rows if row.operation == operation) for operation in ("store", "load")
    )
    return f"With checksums, `disk` stores at {stores} and loads at {loads} of the speed of vLLM's helpers"


def cpu_memory(results: CpuMemory) -> str:
    """Compare the cpu backend with memcpy."""
    ratios = [row.ratio_p50 for row in results.copies]
    return f"`cpu` moves objects at {span(ratios)} of the speed of memcpy"


def disk_capacity(results: DiskCapacity) -> str:
    """Compare stores with and without a capacity."""
    ratios = span(row.ratio for row in results.capacity)
    return f"A folder with a capacity stores at {ratios} of the speed of one without"


def disk_scan(results: DiskScan) -> str:
    """Name the scan's duration, and p50 and p99 of a lookup meanwhile."""
    scan, calls = results.scan[0], results.calls[0]
    return (
        f"A scan of {scan.objects:,} unregistered objects takes {scan.scan_seconds:.0f} s; "
        f"a lookup of {calls.keys} keys meanwhile takes {calls.p50_ms:.1f} ms (p50), {calls.p99_ms:.1f} ms (p99)"
    )


def faults(results: Faults) -> str:
    """Name the ratios of new prompts with the breaker kept closed and with it open."""
    p50 = {row.state: row.p50_ratio for row in results.first_tokens if row.kind == "new"}
    return (
        f"With a hung tier a new prompt takes {p50['hung']:.1f} times as long as without it, "
        f"with its breaker open {p50['breaker open']:.2f} times"
    )


def faults_breaker(results: Faults) -> str:
    """Name the ratios of the medians with an open breaker."""
    ratios = span(row.ratio for row in results.breaker if row.percent == 50)
    return f"With the breaker open, the median time to first token is {ratios} times that without the tier"


def faults_two_tiers(results: Faults) -> str:
    """Name the throughput of a healthy tier below a hung one."""
    ratios = span(row.ratio for row in results.two_tiers if row.aim is not None)
    again = next(row.ratio for row in results.two_tiers[1:] if row.aim is None)
    return f"Below a hung tier, a healthy tier serves {ratios} of its speed alone (a second run alone: {again:.2f})"


def codecs(results: Codecs) -> str:
    """Compare ``zstd-planes`` with ``zstd`` on bf16 values."""
    rows = {(row.data, row.codec, row.level): row for row in results.compression}
    planes, plain = rows["bf16", "zstd-planes", 1], rows["bf16", "zstd", 1]
    highest = max((row for row in rows.values() if (row.data, row.codec) == (planes.data, planes.codec)), key=_level)
    return (
        f"bf16 values become {planes.ratio:.2f} times smaller with zstd-planes, {plain.ratio:.2f} times with zstd; "
        f"level {highest.level} of zstd-planes gives {highest.ratio:.2f}"
    )


def _level(row: Compression) -> int:
    return row.level
