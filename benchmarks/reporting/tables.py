"""Tables of the documents, in Markdown, made from results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.reporting.rows import (
    Backends,
    Codecs,
    CpuMemory,
    Crossover,
    DiskCapacity,
    DiskScan,
    Faults,
    LMCacheConnector,
    Lookup,
    Operation,
    Scheduler,
    Speed,
    Ttft,
)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; all columns but the first are aligned to the right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fraction(ratio: float) -> str:
    """Return a ratio below 1 as 1/n, and others as numbers."""
    return f"1/{1 / ratio:.1f}" if ratio < 1 else f"{ratio:.1f}"


def tokens(count: int) -> str:
    """Return a number of tokens in binary thousands."""
    return f"{count // 1024}k"


def ttft(results: Ttft) -> str:
    """Return the times to first token."""
    return table(
        ("way to the first token", "samples", "p50 ms", "p90 ms", "p99 ms", "ratio of p50"),
        [
            (
                row.name,
                str(row.samples),
                *(f"{n:,.1f}" for n in (row.p50_ms, row.p90_ms, row.p99_ms)),
                f"{row.ratio:.2f}",
            )
            for row in results.first_tokens
        ],
    )


def lmcache_connector(results: LMCacheConnector) -> str:
    """Return the times to first token from an LMCache server."""
    return table(
        (
            "model",
            "way to the first token",
            "samples",
            "p50 ms",
            "p90 ms",
            "p99 ms",
            "load ms",
            "LMCache's load / ours",
        ),
        [
            (
                row.model,
                row.name if row.transfer_mode is None else f"{row.name}, `{row.transfer_mode}`",
                str(row.samples),
                *(f"{n:,.1f}" for n in (row.p50_ms, row.p90_ms, row.p99_ms)),
                "" if row.load_ms is None else f"{row.load_ms:,.1f}",
                ("-" if row.is_ours else "") if row.speed_beside_lmcache is None else f"{row.speed_beside_lmcache:.1f}",
            )
            for row in results.first_tokens
        ],
    )


def crossover(results: Crossover) -> str:
    """Return the times to first token from slow tiers."""
    return table(
        (
            "tier",
            "tokens",
            "compute, p50 ms",
            "spread",
            "load, p50 ms",
            "ours, p50 ms",
            "ours, p90 ms",
            "loaded",
            "ratio",
        ),
        [
            (
                f"{row.latency_ms:g} ms, {row.mb_per_second:,.0f} MB/s",
                f"{row.tokens:,}",
                f"{row.compute_p50_ms:,.0f}",
                f"{row.compute_spread:.2f}",
                *(f"{ms:,.0f}" for ms in (row.load_p50_ms, row.ours_p50_ms, row.ours_p90_ms)),
                f"{row.loaded:.0%}",
                f"{row.ratio:.2f}",
            )
            for row in results.rows
        ],
    )


def cold_lookups(results: Scheduler) -> list[Lookup]:
    """Return the rows of the first question for a prompt."""
    return [row for row in results.lookups if row.question == "cold"]


def scheduler(results: Scheduler) -> str:
    """Return lookups, decoding steps and numbers of objects."""
    lookups = table(
        ("first lookup of a prompt, p50 µs", "prompt", "stock", "ours, engine's thread", "ours, until the answer"),
        [
            (
                row.geometry,
                tokens(row.tokens),
                f"{row.stock_p50_us:.0f}",
                f"{row.engine_p50_us:.0f} ({fraction(row.engine_ratio)})",
                f"{row.ours_p50_us:.0f} ({fraction(row.ratio)})",
            )
            for row in cold_lookups(results)
        ],
    )
    again = table(
        ("later and absent lookups, p50 µs", "prompt", "question", "stock", "ours, engine's thread"),
        [
            (
                row.geometry,
                tokens(row.tokens),
                row.question,
                f"{row.stock_p50_us:.0f}",
                f"{row.engine_p50_us:.0f} ({fraction(row.engine_ratio)})",
            )
            for row in results.lookups
            if row.question != "cold" and row.tokens == max(each.tokens for each in results.lookups)
        ],
    )
    steps = table(
        ("one decoding step, µs", "steps", "stock p50", "stock p90", "ours p50", "ours p90", "ratio of p50"),
        [
            (
                row.geometry,
                str(row.samples),
                *(f"{n:.0f}" for n in (row.stock_p50_us, row.stock_p90_us, row.ours_p50_us, row.ours_p90_us)),
                fraction(row.ratio),
            )
            for row in results.steps
        ],
    )
    objects = table(
        ("objects per 1,024 tokens", "stock", "ours", "ratio"),
        [
            (row.geometry, f"{row.stock_keys:.0f}", f"{row.our_objects:.0f}", fraction(row.ratio))
            for row in results.objects
        ],
    )
    return "\n\n".join((lookups, again, steps, objects))


def size(kib: int) -> str:
    """Return a size with its unit."""
    return f"{kib // 1024} MiB" if kib >= 1024 else f"{kib} KiB"


BACKEND_COLUMNS: tuple[tuple[Operation, int], ...] = (("store", 1), ("load", 1), ("store", 4), ("load", 4))
"""Operations and threads, in the order of the columns."""
OURS = ("ours", "ours, pack of 8")
"""Names of our contenders in the benchmark's process, in an engine's configuration."""
IO_PROCESS = "I/O process"
"""Name of our contender in the I/O process, as engines use it by default."""
LENT = "I/O process, lent memory"
"""Name of the contender that copies to and from the tier's own memory, as engines with a ``cpu`` tier do."""


def ours(rows: Sequence[Speed]) -> list[Speed]:
    """Return the rows of ours in the I/O process. Without such a row, those in the benchmark's process stand for it."""
    elsewhere = {_cell(row) for row in rows if row.name == IO_PROCESS}
    return [row for row in rows if row.name == IO_PROCESS or (row.name in OURS and _cell(row) not in elsewhere)]


def _speed(row: Speed) -> str:
    ratio = row.limit_ratio if row.vllm_ratio is None else row.vllm_ratio
    return f"{row.gb_per_second_p50:.2f} ({ratio:.2f})"


def _cell(row: Speed) -> tuple[str, str, int]:
    return row.backend, row.medium, row.page_kib


def backends(results: Backends) -> str:
    """Return speeds with ratios, the cost of the checksums, and peaks of memory."""
    mine = ours(results.speed)
    lent = [row for row in results.speed if row.name == LENT]
    speeds: list[tuple[str, ...]] = []
    for cell in dict.fromkeys(map(_cell, results.speed)):
        backend, medium, kib = cell
        name = backend if medium == "memory" else f"{backend}, {medium}"
        for label, rows in ((name, mine), (f"{name}, lent memory", lent)):
            found = {(row.operation, row.threads): row for row in rows if _cell(row) == cell}
            if found:
                speeds.append(
                    (f"{label}, pages of {size(kib)}", *(_speed(found[column]) for column in BACKEND_COLUMNS))
                )
    checked = {
        (row.operation, row.threads, row.name): row.cpu_seconds_per_gib
        for row in results.speed
        if row.backend == "cpu" and row.page_kib == 2048
    }
    checksums = table(
        ("CPU seconds per GiB, `cpu`, pages of 2 MiB", "with checksums", "without"),
        [
            (
                f"{operation}, {threads} thread{'s' if threads > 1 else ''}",
                f"{checked[operation, threads, 'ours']:.3f}",
                f"{checked[operation, threads, 'ours, no checksum']:.3f}",
            )
            for operation, threads in BACKEND_COLUMNS
        ],
    )
    peaks = table(
        ("memory beyond that at the start, MiB", "stored", "peak"),
        [(row.name, f"{row.stored_mib:.0f}", f"{row.peak_mib:.1f}") for row in results.peaks],
    )
    header = [f"{operation}, {threads} thread{'s' if threads > 1 else ''}" for operation, threads in BACKEND_COLUMNS]
    costs = _processor_times(results, header)
    return "\n\n".join((table(["GB/s, p50 (ratio)", *header], speeds), *costs, checksums, peaks))


def _processor_times(results: Backends, header: Sequence[str]) -> list[str]:
    """Return a table of CPU seconds per GiB with ratios to the plain loop's; older results have none."""
    compared = [row for row in ours(results.speed) if row.plain_cpu_ratio is not None]
    rows: list[tuple[str, ...]] = []
    for backend, medium, kib in dict.fromkeys(map(_cell, compared)):
        of_cell = [row for row in compared if _cell(row) == (backend, medium, kib)]
        by_column = {(row.operation, row.threads): row for row in of_cell}
        ordered = [by_column[column] for column in BACKEND_COLUMNS]
        figures = [f"{row.cpu_seconds_per_gib:.3f} ({row.plain_cpu_ratio:.2f})" for row in ordered]
        rows.append((f"{backend}, {medium}, pages of {size(kib)}", *figures))
    return [table(["CPU seconds per GiB (ratio to the plain loop)", *header], rows)] if rows else []


def cpu_memory(results: CpuMemory) -> str:
    """Return speeds beside those of plain copies."""
    return table(
        ("tier", "objects", "threads", "operation", "GiB/s", "memcpy GiB/s", "ratio p10", "p50", "p90"),
        [
            (
                "fragmented" if row.fragmented else "even",
                size(row.object_kib),
                str(row.threads),
                row.operation,
                *(f"{n:.1f}" for n in (row.gib_per_second, row.memcpy_gib_per_second)),
                *(f"{n:.2f}" for n in (row.ratio_p10, row.ratio_p50, row.ratio_p90)),
            )
            for row in results.copies
        ],
    )


def disk_capacity(results: DiskCapacity) -> str:
    """Return the costs of a capacity and of fsync."""
    capacity = table(
        ("stores by several processes, MiB/s", "processes", "no capacity", "capacity", "ratio", "taken"),
        [
            (
                f"objects of {size(row.object_kib)}",
                str(row.processes),
                *(f"{n:.0f}" for n in (row.without_mib_per_second, row.with_mib_per_second)),
                f"{row.ratio:.2f}",
                f"{row.taken_ratio:.0%}",
            )
            for row in results.capacity
        ],
    )
    fsync = table(
        ("`fsync`, one process, objects of 2 MiB", "MiB/s"),
        [(f"`{row.policy}`", f"{row.mib_per_second:.0f}") for row in results.fsync],
    )
    return f"{capacity}\n\n{fsync}"


def disk_scan(results: DiskScan) -> str:
    """Return the scan's duration and the calls during the scan."""
    scans = table(
        ("objects", "open, ms", "scan, s", "memory, MiB", "account on disk, MiB"),
        [
            (
                f"{row.objects:,}",
                *(f"{n:.1f}" for n in (row.open_ms, row.scan_seconds, row.memory_mib, row.account_mib)),
            )
            for row in results.scan
        ],
    )
    calls = table(
        ("calls during the scan, ms", "keys", "calls", "first", "p50", "p90", "p99", "max"),
        [
            (
                f"`{row.operation}`",
                str(row.keys),
                str(row.samples),
                *(f"{n:.1f}" for n in (row.first_ms, row.p50_ms, row.p90_ms, row.p99_ms, row.max_ms)),
            )
            for row in results.calls
        ],
    )
    return f"{scans}\n\n{calls}"


def faults(results: Faults) -> str:
    """Return first tokens, with a column for each kind of request."""
    kinds = list(dict.fromkeys(row.kind for row in results.first_tokens))
    states = dict.fromkeys(row.state for row in results.first_tokens)
    cells = {(row.state, row.kind): row for row in results.first_tokens}
    return table(
        ("p50 ms, p99 ms (ratio of p50)", *kinds),
        [
            (
                state,
                *(
                    f"{row.p50_ms:.1f}, {row.p99_ms:.0f} ({row.p50_ratio:.2f})"
                    for row in (cells[state, kind] for kind in kinds)
                ),
            )
            for state in states
        ],
    )


def faults_breaker(results: Faults) -> str:
    """Return the ratios of the open breaker with their intervals."""
    return table(
        ("open breaker beside no tier", "percentile", "ratio", "95 % of resamplings", "aim"),
        [
            (row.kind, f"p{row.percent}", f"{row.ratio:.2f}", f"{row.low:.2f} to {row.high:.2f}", f"≤ {row.aim:.2f}")
            for row in results.breaker
        ],
    )


def faults_two_tiers(results: Faults) -> str:
    """Return the throughput of a healthy tier."""
    return table(
        ("the healthy tier", "batches", "tokens/s", "ratio", "ratios of quarters", "load p50 ms", "load p99 ms"),
        [
            (
                row.state,
                str(row.batches),
                f"{row.tokens_per_second:,.0f}",
                f"{row.ratio:.2f}",
                f"{row.slice_ratio_min:.2f} to {row.slice_ratio_max:.2f}",
                f"{row.load_p50_ms:.1f}",
                f"{row.load_p99_ms:.1f}",
            )
            for row in results.two_tiers
        ],
    )


def codecs(results: Codecs) -> str:
    """Return ratios and speeds of the codecs."""
    return table(
        ("values", "codec", "level", "ratio", "compress MB/s", "decompress MB/s"),
        [
            (
                row.data,
                f"`{row.codec}`" if row.codec.startswith("zstd") else f"{row.codec} (not offered)",
                str(row.level),
                f"{row.ratio:.2f}",
                *("" if n is None else f"{n:,.0f}" for n in (row.encode_mb_per_second, row.decode_mb_per_second)),
            )
            for row in results.compression
        ],
    )
