"""Speed of our backends, beside vLLM's own file helpers and the limits of the machine, in one run.

- "ours" uses a tier as the engine does, in the engine's batches. A store adds a header and a checksum to every object,
  and a load checks both.
- "I/O process" uses the same tier in the I/O process, as engines do by default. "Lent memory" is a ``cpu`` tier whose
  memory is copied to and from directly: the copies of the other rows end in staging memory.
- vLLM's helpers (``vllm.fs_io_C``) check nothing. They get as many plain threads as our tier has, and 16 MiB per call.
- The plain loop moves files of one object with system calls and XXH3 alone, and checks as we do. Its CPU seconds per
  GiB are the floor: "/ plain" is the ratio of ours to them. At 256 KiB its files hold one page.
- The limit is one large file, or a copy of memory, on the same number of threads. It checks nothing either.
- For a distributed store the limit is the engine's own client (:mod:`benchmarks.backends_distributed`). NIXL has as
  many threads as the child process of our tier, up to two for files and one for a bucket. Its name says how many.

All contenders take turns within a round, on the same memory and the same disk.

Packs matter at 256 KiB per group page. Eight such pages are one object of 2 MiB for us ("ours, pack of 8") and eight
files for vLLM. "ours, single" stores each page as an object of its own.

"page cache" means reads and writes through the page cache, without a final sync. So a store is a copy to memory, and a
load finds the pages that were just stored. A ratio compares medians over rounds; above 1, ours is faster.

With ``--encryption`` each of our tiers takes its turns with AES-256-GCM too, at 2 MiB.

    python -m benchmarks.backends [--quick] [--encryption] [--many] [--gib 0.25] [--rounds 7]
        [--only speed] [--backend disk] [--medium O_DIRECT] [--page-kib 2048] [--folder FOLDER] [--json FILE]
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from benchmarks.backends_distributed import DISTRIBUTED, Store, alone, running_stores
from benchmarks.backends_growth import growth_of, peaks_of
from benchmarks.backends_lent import OurLentMemory
from benchmarks.backends_loop import PlainLoop
from benchmarks.backends_process import OurProcess
from benchmarks.backends_rig import (
    CHUNK_BYTES,
    Contender,
    CopyOfMemory,
    Medium,
    Memory,
    OneLargeFile,
    OurTier,
    Sample,
    VllmHelpers,
)
from benchmarks.reporting.document import Run, add_json_option
from benchmarks.reporting.rows import Backends, Calls, Operation, Peak, Speed, percentile
from benchmarks.reporting.tables import IO_PROCESS, LENT, OURS
from offload_core.plugins.registry import load_plugins

PAGE_BYTES = 256 * 1024
THREADS = (1, 4)
AIMS: Mapping[tuple[str, int, Operation, Medium], float] = {
    ("disk", CHUNK_BYTES, "load", "page cache"): 0.75,
    ("disk", CHUNK_BYTES, "load", "O_DIRECT"): 0.95,
    ("disk", CHUNK_BYTES, "store", "page cache"): 0.9,
    ("disk", CHUNK_BYTES, "store", "O_DIRECT"): 0.9,
    ("nfs", CHUNK_BYTES, "load", "page cache"): 0.75,
    ("nfs", CHUNK_BYTES, "store", "page cache"): 0.9,
    ("disk", PAGE_BYTES, "load", "page cache"): 2.0,
    ("disk", PAGE_BYTES, "load", "O_DIRECT"): 2.0,
    ("disk", PAGE_BYTES, "store", "page cache"): 2.0,
    ("disk", PAGE_BYTES, "store", "O_DIRECT"): 2.0,
}
"""The speed in relation to vLLM's helpers that we aim at."""
PLAIN_CPU_AIM = 1.3
"""CPU seconds per GiB in relation to the plain loop's that we aim at, or less: at 2 MiB, through the page cache."""
PEER, PLAIN = "vLLM's helpers", "plain loop"
ENCRYPTED = ", encrypted"
AES = {"name": "encrypted", "encryption": "aes-256-gcm"}
LIMIT_AIMS = dict.fromkeys(("cpu", "lmcache", "mooncake", "nixl"), 0.8)


@dataclass(frozen=True)
class Cell:
    """One set of contenders to compare with each other. The names of our contenders begin with "ours"."""

    backend: str
    medium: Medium
    page_bytes: int
    threads: int


@dataclass
class Measured:
    """All rounds of one contender in one cell."""

    cell: Cell
    name: str
    store: list[Sample] = field(default_factory=list)
    load: list[Sample] = field(default_factory=list)


def p50(samples: list[float]) -> float:
    return percentile(samples, 50)


def cells_of(backend: str) -> list[Cell]:
    media: tuple[Medium, ...] = ("page cache", "O_DIRECT") if backend == "disk" else ("page cache",)
    if backend == "cpu":
        media = ("memory",)
    if backend in DISTRIBUTED:
        media = ("page cache", "network") if backend == "nixl" else ("network",)
    sizes = (CHUNK_BYTES, PAGE_BYTES)
    return [Cell(backend, medium, size, threads) for medium in media for size in sizes for threads in THREADS]


def options_of(backend: str, folder: Path, medium: Medium, nbytes: int) -> dict[str, Any]:
    """Return the configuration keys of one of our tiers, except its number of threads."""
    if backend == "cpu":
        return {"type": "cpu", "capacity": 2 * nbytes}
    if backend == "nfs":
        (folder / "nfs").mkdir(exist_ok=True)
        return {"type": "nfs", "url": (folder / "nfs").as_uri()}
    return {"type": "disk", "path": str(folder / "disk"), "direct_io": "on" if medium == "O_DIRECT" else "off"}


def contenders_of(
    cell: Cell, folder: Path, memory: Memory, chunks: int, stores: Mapping[tuple[str, Medium], Store], encryption: bool
) -> Iterator[Callable[[], Contender]]:
    """Yield a factory for each contender of a cell."""
    own = stores.get((cell.backend, cell.medium))
    options = own.tier if own else options_of(cell.backend, folder, cell.medium, chunks * CHUNK_BYTES)
    options = options | {"io_threads": cell.threads}
    packed = "ours" if cell.page_bytes == CHUNK_BYTES else "ours, pack of 8"
    yield lambda: OurTier(packed, memory, chunks, CHUNK_BYTES, options)
    yield lambda: OurProcess(IO_PROCESS, memory, chunks, CHUNK_BYTES, options)
    if cell.page_bytes != CHUNK_BYTES:
        yield lambda: OurTier("ours, single", memory, chunks, cell.page_bytes, options)
    elif encryption:
        yield lambda: OurTier(packed + ENCRYPTED, memory, chunks, CHUNK_BYTES, options | AES)
        yield lambda: OurProcess(IO_PROCESS + ENCRYPTED, memory, chunks, CHUNK_BYTES, options | AES)
    elif cell.backend == "cpu":
        yield lambda: OurLentMemory(LENT, memory, chunks, CHUNK_BYTES, options)
        yield lambda: OurTier("ours, no checksum", memory, chunks, CHUNK_BYTES, options, checked=False)
    if own is not None:
        yield from alone(cell.backend, memory, chunks, cell.page_bytes, cell.threads, own, folder)
        return
    if cell.backend == "cpu":
        yield lambda: CopyOfMemory("limit: memcpy", memory, chunks, cell.threads)
        return
    direct = cell.medium == "O_DIRECT"
    peer = folder / "vllm"
    yield lambda: VllmHelpers(PEER, memory, chunks, cell.threads, peer, cell.page_bytes, direct)
    yield lambda: PlainLoop(PLAIN, memory, chunks, cell.threads, folder / "plain", cell.page_bytes, direct)
    yield lambda: OneLargeFile("limit: one file", memory, chunks, cell.threads, folder / "limit", direct)


def measure(
    cells: list[Cell],
    folder: Path,
    chunks: int,
    rounds: int,
    console: Console,
    stores: Mapping[tuple[str, Medium], Store],
    encryption: bool,
) -> list[Measured]:
    """Let the contenders of each cell take turns; the first round warms everything up and does not count."""
    rows: list[Measured] = []
    memory = Memory(chunks, 1 + encryption)
    for cell in cells:
        console.print(f"{cell.backend}, {cell.medium}, {cell.page_bytes // 1024} KiB, {cell.threads} threads …")
        contenders = [make() for make in contenders_of(cell, folder, memory, chunks, stores, encryption)]
        measured = [Measured(cell, contender.name) for contender in contenders]
        for number in range(-1, rounds):
            turn = number % len(contenders)
            pairs = list(zip(contenders, measured, strict=True))
            for contender, row in pairs[turn:] + pairs[:turn]:
                stored, loaded = contender.store(number), contender.load(number)
                contender.clean(number)
                if number >= 0:
                    row.store.append(stored)
                    row.load.append(loaded)
        for contender in contenders:
            contender.close()
        rows += measured
    return rows


def touch_page_cache(folder: Path, nbytes: int) -> None:
    """Fill and drop the page cache: memory that a virtual machine uses first is slow, at the first contender's cost."""
    path = folder / "touched"
    block = bytes(CHUNK_BYTES)
    with path.open("wb") as file:
        for _ in range(nbytes // CHUNK_BYTES):
            file.write(block)
    path.unlink()


def made_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    return table


def verdict(ratio: float, aim: float | None, *, at_most: bool = False) -> str:
    if aim is None:
        return f"{ratio:.2f}"
    reached = ratio <= aim if at_most else ratio >= aim
    return f"[{'green' if reached else 'red'}]{ratio:.2f}[/] (aim {aim})"


def speeds_of(cell: Cell, rows: list[Measured]) -> Iterator[Speed]:
    """Yield the figures of one cell; the ratios compare a row with vLLM's helpers, the limit and the plain loop."""
    operations: tuple[Operation, ...] = ("store", "load")
    for operation in operations:
        speeds = {row.name: [sample.gb_per_second for sample in getattr(row, operation)] for row in rows}
        costs = {row.name: p50([sample.cpu_seconds_per_gib for sample in getattr(row, operation)]) for row in rows}
        plain = next((cost for name, cost in costs.items() if name == PLAIN), None)
        peer = next((p50(speed) for name, speed in speeds.items() if name == PEER), None)
        limit = next(p50(speed) for name, speed in speeds.items() if name.startswith("limit"))
        for row in rows:
            speed = speeds[row.name]
            ours = row.name in (*OURS, IO_PROCESS, LENT)
            yield Speed(
                backend=cell.backend,
                medium=cell.medium,
                page_kib=cell.page_bytes // 1024,
                threads=cell.threads,
                operation=operation,
                name=row.name,
                rounds=len(speed),
                gb_per_second_p50=p50(speed),
                gb_per_second_p10=percentile(speed, 10),
                gb_per_second_p90=percentile(speed, 90),
                cpu_seconds_per_gib=costs[row.name],
                vllm_ratio=p50(speed) / peer if peer else None,
                limit_ratio=p50(speed) / limit,
                plain_cpu_ratio=costs[row.name] / plain if plain else None,
                vllm_aim=AIMS.get((cell.backend, cell.page_bytes, operation, cell.medium)) if ours else None,
                limit_aim=LIMIT_AIMS.get(cell.backend) if ours and _has_limit_aim(cell) else None,
                plain_cpu_aim=PLAIN_CPU_AIM if ours and _has_plain_cpu_aim(cell) else None,
            )


def _has_limit_aim(cell: Cell) -> bool:
    """Return whether the speed in relation to the limit has an aim: for distributed stores, at 2 MiB."""
    return cell.backend not in DISTRIBUTED or cell.page_bytes == CHUNK_BYTES


def _has_plain_cpu_aim(cell: Cell) -> bool:
    """Return whether the processor time in relation to the plain loop has an aim."""
    return cell.backend in ("disk", "nfs") and cell.medium == "page cache" and cell.page_bytes == CHUNK_BYTES


def speed_table(cell: Cell, rows: list[Speed]) -> Table:
    """Return the table of one cell."""
    table = made_table(
        f"{cell.backend}, {cell.medium}, pages of {cell.page_bytes // 1024} KiB, {cell.threads} thread(s)",
        "", "GB/s p50", "p10", "p90", "CPU s/GiB", "/ plain", "/ vLLM", "/ limit",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            f"{row.operation}: {row.name}",
            *(f"{speed:.2f}" for speed in (row.gb_per_second_p50, row.gb_per_second_p10, row.gb_per_second_p90)),
            f"{row.cpu_seconds_per_gib:.3f}",
            "" if row.plain_cpu_ratio is None else verdict(row.plain_cpu_ratio, row.plain_cpu_aim, at_most=True),
            "" if row.vllm_ratio is None else verdict(row.vllm_ratio, row.vllm_aim),
            verdict(row.limit_ratio, row.limit_aim),
        )
    return table


def aims_table(speeds: Mapping[Cell, Sequence[Speed]], rows: Sequence[Measured]) -> Table:
    """Return the ratios that have an aim beside vLLM's helpers or the plain loop, with their spread over rounds.

    "plain / vLLM" is the speed of the plain loop beside the helpers: the cost of the checksums alone.
    """
    table = made_table(
        "Aims: ratios of medians over rounds, and p10 to p90 of the ratios within a round",
        "", "threads", "GB/s / vLLM", "p10 to p90", "plain / vLLM", "CPU s/GiB / plain", "p10 to p90",
    )  # fmt: skip
    plain_ratios = {
        (cell, speed.operation): speed.vllm_ratio
        for cell, figures in speeds.items()
        for speed in figures
        if speed.name == PLAIN
    }
    for cell, figures in speeds.items():
        samples = {row.name: row for row in rows if row.cell == cell}
        for speed in figures:
            if speed.vllm_aim is None and speed.plain_cpu_aim is None:
                continue
            mine, peer, plain = (getattr(samples[name], speed.operation) for name in (speed.name, PEER, PLAIN))
            rates = [one.gb_per_second / other.gb_per_second for one, other in zip(mine, peer, strict=True)]
            costs = [
                one.cpu_seconds_per_gib / other.cpu_seconds_per_gib for one, other in zip(mine, plain, strict=True)
            ]
            table.add_row(
                f"{speed.operation}: {speed.name}, {cell.backend}, {cell.medium}, {speed.page_kib} KiB",
                str(cell.threads),
                verdict(speed.vllm_ratio or 0.0, speed.vllm_aim),
                f"{percentile(rates, 10):.2f} to {percentile(rates, 90):.2f}",
                f"{plain_ratios[cell, speed.operation] or 0.0:.2f}",
                verdict(speed.plain_cpu_ratio or 0.0, speed.plain_cpu_aim, at_most=True),
                f"{percentile(costs, 10):.2f} to {percentile(costs, 90):.2f}",
            )
    return table


def encryption_table(rows: Sequence[Measured]) -> Table:
    """Return the speed with encryption in relation to that without, with the spread of the ratios over rounds."""
    table = made_table(
        "Encryption: GB/s with AES-256-GCM / without",
        "", "threads", "stores", "p10 to p90", "loads", "p10 to p90",
    )  # fmt: skip
    plain = {(row.cell, row.name): row for row in rows}
    for row in rows:
        without = plain.get((row.cell, row.name.removesuffix(ENCRYPTED)))
        if without is None or without is row:
            continue
        figures = []
        for ours, other in ((row.store, without.store), (row.load, without.load)):
            speeds = [[sample.gb_per_second for sample in samples] for samples in (ours, other)]
            rounds = [one / two for one, two in zip(*speeds, strict=True)]
            figures.append(f"{p50(speeds[0]) / p50(speeds[1]):.2f}")
            figures.append(f"{percentile(rounds, 10):.2f} to {percentile(rounds, 90):.2f}")
        table.add_row(f"{without.name}, {row.cell.backend}, {row.cell.medium}", str(row.cell.threads), *figures)
    return table


def peak_table(peaks: list[Peak]) -> Table:
    table = made_table("Peak memory beyond staging, MiB, 4 threads, each in a process of its own", "", "stored", "peak")
    for peak in peaks:
        table.add_row(peak.name, f"{peak.stored_mib:.0f}", f"{peak.peak_mib:.1f}")
    return table


def growth_table(growths: list[Calls]) -> Table:
    table = made_table(
        "As objects grow, objects of 5 KiB: µs per call, p50 (p90)",
        "", "objects", "fill µs/object", "contains 64", "prepare_store 8", "store 8", "prepare_load and load 8",
    )  # fmt: skip
    for row in growths:
        calls = (
            (row.contains_p50_us, row.contains_p90_us),
            (row.prepare_store_p50_us, row.prepare_store_p90_us),
            (row.store_p50_us, row.store_p90_us),
            (row.load_p50_us, row.load_p90_us),
        )
        cells = [f"{median:.0f} ({high:.0f})" for median, high in calls]
        table.add_row(row.name, f"{row.objects:,}", f"{row.fill_us_per_object:.0f}", *cells)
    return table


@contextmanager
def working_folder(parent: Path | None) -> Iterator[Path]:
    """Make a temporary folder and remove it at the end, also after a failure."""
    folder = Path(tempfile.mkdtemp(prefix="offload-core-bench-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="few bytes, rounds and objects, to see whether everything runs"
    )
    parser.add_argument("--many", action="store_true", help="grow to a million objects")
    parser.add_argument("--gib", type=float, default=0.25, help="GiB that each contender stores and loads in a round")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds")
    parser.add_argument("--folder", type=Path, help="folder to write to, on the disk to measure")
    parser.add_argument("--backend", action="append", help="measure only this backend; give it again for more")
    parser.add_argument("--medium", choices=get_args(Medium), help="measure speeds only through this medium")
    parser.add_argument("--page-kib", type=int, choices=(2048, 256), help="measure speeds only with pages of this size")
    parser.add_argument("--encryption", action="store_true", help="measure our tiers with encryption too, at 2 MiB")
    parser.add_argument("--only", choices=("speed", "growth"), help="measure only this part")
    add_json_option(parser)
    arguments = parser.parse_args()
    run = Run(arguments)
    if arguments.encryption:
        os.environ["OFFLOAD_CORE_ENCRYPTED_ENCRYPTION_KEYS"] = f"bench:{os.urandom(32).hex()}"
    logging.getLogger("vllm").setLevel(logging.ERROR)
    console = Console(width=150)
    chunks = 16 if arguments.quick else max(8, round(arguments.gib * 1024**3 / CHUNK_BYTES))
    rounds = 2 if arguments.quick else arguments.rounds
    counts = [1000] if arguments.quick else [10**3, 10**4, 10**5, *([10**6] if arguments.many else [])]
    known = set(load_plugins().backend_types)
    reasons = {name: reason for name, why_not in DISTRIBUTED.items() if (reason := why_not())}
    backends = [name for name in arguments.backend or ("disk", "cpu", "nfs") if name in known - reasons.keys()]
    for name in {*(arguments.backend or ())} & reasons.keys():
        console.print(f"note: {name} cannot run here, so the tables have no rows for it: {reasons[name]}")
    for name in {*(arguments.backend or ("nfs",))} - known:
        console.print(f"note: no backend {name!r} is installed, so the tables have no rows for it")
    with working_folder(arguments.folder) as folder:
        touch_page_cache(folder, 3 * chunks * CHUNK_BYTES)
        # Measure the peaks first: this process can be forked only while it has no threads.
        tiers = {
            f"{name}, {medium}": options_of(name, folder, medium, chunks * CHUNK_BYTES)
            for name in backends
            if name not in DISTRIBUTED
            for medium in dict.fromkeys(cell.medium for cell in cells_of(name))
        }
        peaks = [] if arguments.only == "growth" or not tiers else peaks_of(tiers, folder, chunks)
        cells = [
            cell
            for name in backends
            for cell in cells_of(name)
            if arguments.only != "growth"
            and cell.medium == (arguments.medium or cell.medium)
            and cell.page_bytes == (arguments.page_kib or cell.page_bytes // 1024) * 1024
        ]
        places = [(cell.backend, cell.medium) for cell in cells]
        with running_stores(places, folder, chunks * CHUNK_BYTES) as stores:
            rows = measure(cells, folder, chunks, rounds, console, stores, arguments.encryption)
        local = [name for name in backends if name not in DISTRIBUTED]
        growths = [] if arguments.only == "speed" else growth_of(local, folder, counts, console)
    speeds = {cell: list(speeds_of(cell, [row for row in rows if row.cell == cell])) for cell in cells}
    for cell, figures in speeds.items():
        console.print(speed_table(cell, figures))
    if (aims := aims_table(speeds, rows)).row_count:
        console.print(aims)
    if arguments.encryption:
        console.print(encryption_table(rows))
    if peaks:
        console.print(peak_table(peaks))
    if growths:
        console.print(growth_table(growths))
    run.write(Backends(speed=[row for part in speeds.values() for row in part], peaks=peaks, growth=growths))


if __name__ == "__main__":
    main()
