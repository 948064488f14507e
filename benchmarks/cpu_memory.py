"""Speed of the cpu tier's memory, beside plain copies of the same sizes in a region as large, in interleaved rounds.

Each round copies the same number of bytes in every way, one way after the other. So other work on the machine slows all
ways alike. Copies go between random places of the tier and random places of a touched buffer.

* memcpy: ``numpy.copyto`` between two touched regions, on one or four threads. This is the limit.
* store, load: the backend's reservation, data step and release. One or four callers call at once on the event loop.
  A call has as many objects as a batch of the transfer engine (2 MiB or 8 objects).
* fragmented: the same after objects of mixed sizes have filled the tier and replaced random ones of all sizes.

The ratio is memcpy's time divided by ours in the same round: 1 means memcpy's speed. CPU seconds cover all threads.

    python -m benchmarks.cpu_memory [--capacity-mib 1024] [--rounds 30] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from offload_backend_cpu import CpuBackend, CpuOptions
from rich.console import Console
from rich.table import Table

from benchmarks.reporting.document import Run, add_json_option
from benchmarks.reporting.rows import Copies, CpuMemory, Operation
from offload_core.api.backend import BackendContext, LoadOutcome, StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.runtime.threads import DaemonExecutor

KIB, MIB = 1024, 1024 * 1024
SIZES_BYTES = (256 * KIB, 2 * MIB, 8 * MIB)
MIXED_BYTES = (8 * KIB, 40 * KIB, *SIZES_BYTES)
THREADS = (1, 4)
ROUND_BYTES = 128 * MIB
BATCH_BYTES, BATCH_OBJECTS = 2 * MIB, 8
STAGING_BYTES = 256 * MIB
GIB = 1024 * MIB


class Seconds(NamedTuple):
    """Elapsed time and the processor time of all threads; a busy machine changes the processor time less."""

    elapsed: float
    processor: float


def now() -> Seconds:
    """Return the present values of both clocks."""
    return Seconds(time.perf_counter(), time.process_time())


def since(started: Seconds) -> Seconds:
    """Return the time that has passed since ``started``, on both clocks."""
    return Seconds(*(end - start for end, start in zip(now(), started, strict=True)))


def touched_memory(nbytes: int) -> np.ndarray[Any, Any]:
    """Return memory that begins with a page, as staging memory does; a copy of 256 KiB depends on that."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    touched = np.frombuffer(memory, dtype=np.uint8)
    touched[:] = 1
    return touched


class Tier:
    """A cpu backend with a staging buffer and numbered objects."""

    def __init__(self, capacity_bytes: int) -> None:
        self.backend = CpuBackend(
            CpuOptions.model_validate({"capacity": capacity_bytes, "pin": "off"}),
            BackendContext("ram", DaemonExecutor(max(THREADS), "ram")),
        )
        self.staging = touched_memory(STAGING_BYTES)
        self.chooser = random.Random(3)
        self._next = 0

    def names(self, count: int) -> list[ObjectKey]:
        """Return keys of new objects."""
        self._next += count
        return [ObjectKey("0" * 64, "bench", n.to_bytes(32, "big")) for n in range(self._next - count, self._next)]

    def views(self, size: int, count: int) -> list[memoryview]:
        """Return random places of the staging buffer that do not overlap."""
        places = self.chooser.sample(range(STAGING_BYTES // size), count)
        return [memoryview(self.staging)[place * size : (place + 1) * size] for place in places]  # type: ignore[arg-type]

    async def store(self, keys: Sequence[ObjectKey], views: Sequence[memoryview]) -> None:
        """Store with the calls of a tier."""
        reservation = await self.backend.prepare_store(keys, [len(view) for view in views])
        assert set(await self.backend.store(keys, views)) == {StoreOutcome.STORED}
        await reservation.release()

    async def load(self, keys: Sequence[ObjectKey], views: Sequence[memoryview]) -> None:
        """Load with the calls of a tier."""
        reservation = await self.backend.prepare_load(keys)
        assert set(await self.backend.load_into(keys, views)) == {LoadOutcome.HIT}
        await reservation.release()

    async def fill(self, sizes_bytes: Sequence[int], total_bytes: int) -> None:
        """Store ``total_bytes`` in objects of random sizes, and delete some at random so that holes are everywhere."""
        known: list[ObjectKey] = []
        while total_bytes > 0:
            size = self.chooser.choice(sizes_bytes)
            known += (names := self.names(1))
            await self.store(names, self.views(size, 1))
            total_bytes -= size
            if len(sizes_bytes) > 1 and self.chooser.random() < 0.3:
                await self.backend.delete([known.pop(self.chooser.randrange(len(known)))])


async def at_once(callers: int, call: Callable[[int], Awaitable[None]], calls: int) -> Seconds:
    """Make calls number 0 to ``calls`` - 1, ``callers`` at once, and return their time."""
    numbers = iter(range(calls))

    async def caller() -> None:
        for number in numbers:
            await call(number)

    started = now()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return since(started)


def plain_copies(
    pool: ThreadPoolExecutor, threads: int, region: np.ndarray[Any, Any], tier: Tier, size: int, count: int
) -> Seconds:
    """Copy by numpy between random places and return the time."""
    places = [tier.chooser.randrange(len(region) // size) * size for _ in range(count)]
    targets = [np.frombuffer(view, dtype=np.uint8) for view in tier.views(size, count)]

    def some(first: int) -> None:
        for place, target in zip(places[first::threads], targets[first::threads], strict=True):
            np.copyto(target, region[place : place + size])

    started = now()
    if threads == 1:
        some(0)
    else:
        list(pool.map(some, range(threads)))
    return since(started)


async def measure(capacity_bytes: int, rounds: int, fragmented: bool) -> list[Copies]:
    """Return a row for each size, number of threads and direction."""
    tier = Tier(capacity_bytes)
    await tier.backend.open()
    await tier.fill(MIXED_BYTES if fragmented else [2 * MIB], (3 if fragmented else 1) * capacity_bytes)
    region = touched_memory(capacity_bytes)
    operations: tuple[Operation, ...] = ("store", "load")
    rows: list[Copies] = []
    with ThreadPoolExecutor(max(THREADS)) as pool:
        for size in SIZES_BYTES:
            count, batch = ROUND_BYTES // size, min(BATCH_OBJECTS, max(1, BATCH_BYTES // size))
            for threads in THREADS:
                seconds: dict[str, list[Seconds]] = {"memcpy": [], "store": [], "load": []}
                for _ in range(rounds):
                    names, views = tier.names(count), tier.views(size, count)
                    batches = [slice(first, first + batch) for first in range(0, count, batch)]

                    async def store(number: int) -> None:
                        await tier.store(names[batches[number]], views[batches[number]])  # noqa: B023  # awaited here

                    async def load(number: int) -> None:
                        await tier.load(names[batches[number]], views[batches[number]])  # noqa: B023  # awaited here

                    seconds["store"].append(await at_once(threads, store, len(batches)))
                    seconds["memcpy"].append(plain_copies(pool, threads, region, tier, size, count))
                    views = tier.views(size, count)
                    seconds["load"].append(await at_once(threads, load, len(batches)))
                for way in operations:
                    ratios = np.array(seconds["memcpy"]) / np.array(seconds[way])
                    low, middle, high = np.percentile(ratios[:, 0], [10, 50, 90])
                    ours, plain = (np.median(seconds[name], axis=0) for name in (way, "memcpy"))
                    rows.append(
                        Copies(
                            fragmented=fragmented,
                            object_kib=size // KIB,
                            threads=threads,
                            operation=way,
                            rounds=rounds,
                            gib_per_second=ROUND_BYTES / GIB / float(ours[0]),
                            memcpy_gib_per_second=ROUND_BYTES / GIB / float(plain[0]),
                            ratio_p10=float(low),
                            ratio_p50=float(middle),
                            ratio_p90=float(high),
                            cpu_seconds_per_gib=float(ours[1]) * GIB / ROUND_BYTES,
                            memcpy_cpu_seconds_per_gib=float(plain[1]) * GIB / ROUND_BYTES,
                        )
                    )
    await tier.backend.close()
    return rows


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--capacity-mib", type=int, default=1024, help="MiB of the tier and of the region for plain copies"
    )
    parser.add_argument("--rounds", type=int, default=30, help="measured rounds")
    add_json_option(parser)
    arguments = parser.parse_args()
    run = Run(arguments)
    rows = [
        row
        for fragmented in (False, True)
        for row in asyncio.run(measure(arguments.capacity_mib * MIB, arguments.rounds, fragmented))
    ]
    table = Table(
        "tier", "KiB", "threads", "way", "GiB/s", "memcpy GiB/s", "ratio p10", "p50", "p90", "CPU s/GiB", "memcpy"
    )
    for row in rows:
        figures = (
            *(row.gib_per_second, row.memcpy_gib_per_second, row.ratio_p10, row.ratio_p50, row.ratio_p90),
            *(row.cpu_seconds_per_gib, row.memcpy_cpu_seconds_per_gib),
        )
        table.add_row(
            "fragmented" if row.fragmented else "even",
            str(row.object_kib),
            str(row.threads),
            row.operation,
            *(f"{figure:.2f}" for figure in figures),
        )
    Console(width=120).print(table)
    run.write(CpuMemory(copies=rows))


if __name__ == "__main__":
    main()
