"""Lookups on a disk tier while it stores or loads as fast as it can: milliseconds until the answer.

- "I/O process" asks the tier in the I/O process, as engines do by default; "ours" asks it on threads of this process.
- "queued" puts the same question, in this process, into the queue of the threads that load or store meanwhile.

A lookup asks about 16 absent objects. The next one begins ten milliseconds after its answer.

    python -m benchmarks.busy_lookups [--seconds 5] [--gib 0.5] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.backends import options_of, working_folder
from benchmarks.backends_process import OurProcess
from benchmarks.backends_rig import CHUNK_BYTES, NAMESPACE, Medium, Memory, OurTier
from benchmarks.reporting.rows import percentile
from offload_core.api.keys import ObjectKey

KEYS = [ObjectKey(NAMESPACE, "bench", bytes([number]) * 32) for number in range(16)]
PAUSE_SECONDS = 0.01
MEDIA: tuple[Medium, ...] = ("page cache", "O_DIRECT")


class _QueuedTier(OurTier):
    """A tier that can also ask on the threads that load or store."""

    def look_up_queued(self, work: str) -> None:
        backend = self._tier.backend
        run = backend.run_load if work == "loads" else backend.run_blocking
        self._io.submit(run(backend._folder.contains, KEYS)).result()  # type: ignore[attr-defined]


@contextmanager
def asking(ask: Callable[[], object]) -> Iterator[list[float]]:
    """Ask again and again on a thread, and yield the milliseconds of all answers, a list that grows."""
    milliseconds: list[float] = []
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(PAUSE_SECONDS):
            began = time.perf_counter()
            ask()
            milliseconds.append((time.perf_counter() - began) * 1e3)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield milliseconds
    finally:
        ended.set()
        thread.join()


def measure(tier: OurTier, work: str, seconds: float, ask: Callable[[], object]) -> list[float]:
    """Return the milliseconds of each lookup beside some work."""
    end = time.monotonic() + seconds
    stored = 0
    with asking(ask) as milliseconds:
        while time.monotonic() < end:
            if work == "stores":
                stored += 1
                tier.store(stored)
            elif work == "loads":
                tier.load(0)
            else:
                time.sleep(PAUSE_SECONDS)
    for number in range(1, stored + 1):
        tier.clean(number)
    return milliseconds


def rows_of(folder: Path, medium: Medium, memory: Memory, chunks: int, seconds: float) -> Iterator[Sequence[str]]:
    """Measure all contenders on one medium, and yield the rows of the table."""
    options = options_of("disk", folder, medium, chunks * CHUNK_BYTES)
    process = OurProcess("I/O process", memory, chunks, CHUNK_BYTES, options)
    ours = _QueuedTier("ours", memory, chunks, CHUNK_BYTES, options)
    ours.store(0)
    for work in ("nothing", "stores", "loads"):
        contenders: list[tuple[OurTier, str, Callable[[], object]]] = [
            (process, "I/O process", partial(process.look_up, KEYS)),
            (ours, "ours", partial(ours.look_up, KEYS)),
            (ours, "queued", partial(ours.look_up_queued, work)),
        ]
        for tier, name, ask in contenders:
            found = measure(tier, work, seconds, ask)
            p50, p90, p99 = (percentile(found, at) for at in (50, 90, 99))
            yield medium, work, name, str(len(found)), f"{p50:.1f}", f"{p90:.1f}", f"{p99:.1f}"
    ours.clean(0)
    for tier in (process, ours):
        tier.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each measurement")
    parser.add_argument("--gib", type=float, default=0.5, help="GiB of each store and load")
    parser.add_argument("--folder", type=Path, help="folder to write to, on the disk to measure")
    arguments = parser.parse_args()
    chunks = max(8, round(arguments.gib * 1024**3 / CHUNK_BYTES))
    table = Table(title="Lookups of 16 objects: ms until the answer", title_justify="left")
    for column in ("medium", "beside", "", "lookups", "p50", "p90", "p99"):
        table.add_column(column, justify="left" if column in ("medium", "beside", "") else "right")
    with working_folder(arguments.folder) as folder:
        memory = Memory(chunks)
        for medium in MEDIA:
            for row in rows_of(folder, medium, memory, chunks, arguments.seconds):
                table.add_row(*row)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
