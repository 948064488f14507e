"""How fast our backends store and load, beside vLLM's own file helpers and the limits of the machine, in one run.

"ours" goes through a tier as the engine does, in the engine's batches: every object gets a header and a checksum before
it is stored, and both are checked when it is loaded. vLLM's helpers (``vllm.fs_io_C``) check nothing; they get plain
threads, as many as our tier has, and 16 MiB per call. The limit is one large file, or a copy of memory, on as many
threads; it checks nothing either. All contenders take turns within a round, on the same memory and the same disk.

256 KiB per group page is where packs count: eight pages of 256 KiB are one object of 2 MiB for us ("ours, pack of 8")
and eight files for vLLM. "ours, single" stores each of them as an object of its own.

"page cache" is read and written through it, without a final sync: a store is a copy to memory, and a load finds the
pages that were just stored. Ratios are of medians over rounds: above 1 we are faster.

    python -m benchmarks.backends [--quick] [--many] [--gib 0.25] [--rounds 7] [--only speed]
        [--backend disk] [--folder FOLDER] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.backends_growth import Growth, Peak, growth_of, peaks_of
from benchmarks.backends_rig import (
    CHUNK_BYTES,
    MIB,
    Contender,
    CopyOfMemory,
    Medium,
    Memory,
    OneLargeFile,
    OurTier,
    Sample,
    VllmHelpers,
)
from offload_core.plugins.registry import load_plugins

PAGE_BYTES = 256 * 1024
THREADS = (1, 4)
AIMS = {("disk", CHUNK_BYTES): 1.0, ("disk", PAGE_BYTES): 2.0}
AIM_OF_MEMCPY = 0.8


@dataclass(frozen=True)
class Cell:
    """One set of contenders that are compared with each other. The names of ours begin with "ours"."""

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


def percentile(samples: list[float], percent: int) -> float:
    ordered = sorted(samples)
    return ordered[round(percent / 100 * (len(ordered) - 1))]


def p50(samples: list[float]) -> float:
    return percentile(samples, 50)


def cells_of(backend: str) -> list[Cell]:
    media: tuple[Medium, ...] = ("page cache", "O_DIRECT") if backend == "disk" else ("page cache",)
    if backend == "cpu":
        media = ("memory",)
    sizes = (CHUNK_BYTES, PAGE_BYTES)
    return [Cell(backend, medium, size, threads) for medium in media for size in sizes for threads in THREADS]


def options_of(backend: str, folder: Path, medium: Medium, nbytes: int) -> dict[str, Any]:
    """Return the keys of a tier of ours, but for its threads."""
    if backend == "cpu":
        return {"type": "cpu", "capacity": 2 * nbytes}
    if backend == "nfs":
        (folder / "nfs").mkdir(exist_ok=True)
        return {"type": "nfs", "url": (folder / "nfs").as_uri()}
    return {"type": "disk", "path": str(folder / "disk"), "direct_io": "on" if medium == "O_DIRECT" else "off"}


def contenders_of(cell: Cell, folder: Path, memory: Memory, chunks: int) -> Iterator[Callable[[], Contender]]:
    """Yield what makes each contender of a cell."""
    options = options_of(cell.backend, folder, cell.medium, chunks * CHUNK_BYTES) | {"io_threads": cell.threads}
    packed = "ours" if cell.page_bytes == CHUNK_BYTES else "ours, pack of 8"
    yield lambda: OurTier(packed, memory, chunks, CHUNK_BYTES, options)
    if cell.page_bytes != CHUNK_BYTES:
        yield lambda: OurTier("ours, single", memory, chunks, cell.page_bytes, options)
    elif cell.backend == "cpu":
        yield lambda: OurTier("ours, no checksum", memory, chunks, CHUNK_BYTES, options, checked=False)
    if cell.backend == "cpu":
        yield lambda: CopyOfMemory("limit: memcpy", memory, chunks, cell.threads)
        return
    direct = cell.medium == "O_DIRECT"
    peer = folder / "vllm"
    yield lambda: VllmHelpers("vLLM's helpers", memory, chunks, cell.threads, peer, cell.page_bytes, direct)
    yield lambda: OneLargeFile("limit: one file", memory, chunks, cell.threads, folder / "limit", direct)


def measure(cells: list[Cell], folder: Path, chunks: int, rounds: int, console: Console) -> list[Measured]:
    """Let the contenders of each cell take turns; the first round, which warms everything up, is dropped."""
    rows: list[Measured] = []
    memory = Memory(chunks)
    for cell in cells:
        console.print(f"{cell.backend}, {cell.medium}, {cell.page_bytes // 1024} KiB, {cell.threads} threads …")
        contenders = [make() for make in contenders_of(cell, folder, memory, chunks)]
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
    """Fill and drop page cache: memory that a virtual machine has never used is slow, and would hit who comes first."""
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


def verdict(ratio: float, aim: float | None) -> str:
    return f"{ratio:.2f}" if aim is None else f"[{'green' if ratio >= aim else 'red'}]{ratio:.2f}[/] (aim {aim})"


def speed_table(cell: Cell, rows: list[Measured]) -> Table:
    """Show one cell; the ratios are those of the row to vLLM's helpers and to the limit."""
    table = made_table(
        f"{cell.backend}, {cell.medium}, pages of {cell.page_bytes // 1024} KiB, {cell.threads} thread(s)",
        "", "GB/s p50", "p10", "p90", "CPU s/GiB", "/ vLLM", "/ limit",
    )  # fmt: skip
    for operation in ("store", "load"):
        speeds = {row.name: [sample.gb_per_second for sample in getattr(row, operation)] for row in rows}
        peer = next((p50(speed) for name, speed in speeds.items() if name.startswith("vLLM")), None)
        limit = next(p50(speed) for name, speed in speeds.items() if name.startswith("limit"))
        for row in rows:
            speed = speeds[row.name]
            cpu = p50([sample.cpu_seconds_per_gib for sample in getattr(row, operation)])
            ours = row.name in ("ours", "ours, pack of 8")
            to_peer = (
                verdict(p50(speed) / peer, AIMS.get((cell.backend, cell.page_bytes)) if ours else None) if peer else ""
            )
            aim = AIM_OF_MEMCPY if cell.backend == "cpu" and ours else None
            table.add_row(
                f"{operation}: {row.name}", *(f"{percentile(speed, percent):.2f}" for percent in (50, 10, 90)),
                f"{cpu:.3f}", to_peer, verdict(p50(speed) / limit, aim),
            )  # fmt: skip
    return table


def peak_table(peaks: list[Peak]) -> Table:
    table = made_table("Peak memory beyond staging, MiB, 4 threads, each in a process of its own", "", "stored", "peak")
    for peak in peaks:
        table.add_row(peak.name, f"{peak.stored_bytes / MIB:.0f}", f"{peak.peak_bytes / MIB:.1f}")
    return table


def growth_table(growths: list[Growth]) -> Table:
    table = made_table(
        "As objects grow, objects of 5 KiB: µs per call, p50 (p90)",
        "", "objects", "fill µs/object", "contains 64", "prepare_store 8", "store 8", "prepare_load and load 8",
    )  # fmt: skip
    for row in growths:
        calls = (row.contains, row.prepare_store, row.store, row.load)
        cells = [f"{p50(call) * 1e6:.0f} ({percentile(call, 90) * 1e6:.0f})" for call in calls]
        table.add_row(row.name, f"{row.objects:,}", f"{row.fill_seconds / row.objects * 1e6:.0f}", *cells)
    return table


@contextmanager
def working_folder(parent: Path | None) -> Iterator[Path]:
    """A folder that is swept in the end, whatever was measured."""
    folder = Path(tempfile.mkdtemp(prefix="offload-core-bench-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few bytes, few rounds, few objects: does it run?")
    parser.add_argument("--many", action="store_true", help="grow to a million objects")
    parser.add_argument("--gib", type=float, default=0.25, help="GiB that each contender moves in a round")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds")
    parser.add_argument("--folder", type=Path, help="where to write: a folder on the disk to be measured")
    parser.add_argument("--backend", action="append", help="only this backend; may be repeated")
    parser.add_argument("--only", choices=("speed", "growth"), help="only this part")
    parser.add_argument("--json", type=Path, help="also write the samples to this file")
    arguments = parser.parse_args()
    logging.getLogger("vllm").setLevel(logging.ERROR)
    console = Console(width=150)
    chunks = 16 if arguments.quick else max(8, round(arguments.gib * 1024**3 / CHUNK_BYTES))
    rounds = 2 if arguments.quick else arguments.rounds
    counts = [1000] if arguments.quick else [10**3, 10**4, 10**5, *([10**6] if arguments.many else [])]
    known = set(load_plugins().backend_types)
    backends = [name for name in arguments.backend or ("disk", "cpu", "nfs") if name in known]
    for name in {*(arguments.backend or ("nfs",))} - known:
        console.print(f"note: no backend {name!r} is installed; its rows are left out")
    with working_folder(arguments.folder) as folder:
        touch_page_cache(folder, 3 * chunks * CHUNK_BYTES)
        # First, while this process has no threads yet and can be forked.
        tiers = {
            f"{name}, {medium}": options_of(name, folder, medium, chunks * CHUNK_BYTES)
            for name in backends
            for medium in dict.fromkeys(cell.medium for cell in cells_of(name))
        }
        peaks = [] if arguments.only == "growth" else peaks_of(tiers, folder, chunks)
        cells = [] if arguments.only == "growth" else [cell for name in backends for cell in cells_of(name)]
        rows = measure(cells, folder, chunks, rounds, console)
        growths = [] if arguments.only == "speed" else growth_of(backends, folder, counts, console)
    for cell in cells:
        console.print(speed_table(cell, [row for row in rows if row.cell == cell]))
    if peaks:
        console.print(peak_table(peaks))
    if growths:
        console.print(growth_table(growths))
    if arguments.json:
        made: dict[str, Sequence[Any]] = {"speed": rows, "peaks": peaks, "growth": growths}
        document = {name: [asdict(row) for row in part] for name, part in made.items()}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
