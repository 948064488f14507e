"""Costs of a capacity and of ``fsync`` for the disk backend.

python -m benchmarks.disk_capacity FOLDER [--mib 512] [--rounds 3] [--json FILE]

Four processes store at full speed into one folder, without a capacity and with one that holds a quarter of the bytes.
With it, three quarters of the objects are evicted. Then one process stores with each fsync policy. Rounds alternate,
because the speed of a disk changes from minute to minute. The output shows the medians and their ratio, and the lowest
stored part of the objects. All work happens below FOLDER, and no object is left there.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from offload_backend_disk import DiskBackend, DiskOptions

from benchmarks.reporting.document import Run, add_json_option
from benchmarks.reporting.rows import Capacity, DiskCapacity, Fsync
from offload_core.api.backend import BackendContext, StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.runtime.threads import DaemonExecutor

PROCESSES = 4
THREADS = 4
SIZES = (2 * 2**20, 256 * 2**10)
"""Bytes of an object."""
BATCH = 8
FSYNCS = ("none", "data", "data and folder")


async def store(options: DiskOptions, count: int, nbytes: int, barrier: Barrier) -> tuple[float, int]:
    """Store ``count`` objects and return the seconds and the number of stored objects."""
    backend = DiskBackend(options, BackendContext("disk", DaemonExecutor(THREADS, "disk")))
    await backend.open()
    buffer = memoryview(os.urandom(nbytes))
    numbers = iter(range(0, count, BATCH))
    stored = 0

    async def work() -> None:
        nonlocal stored
        for start in numbers:
            keys = [ObjectKey("ab" * 32, "full-u256", os.urandom(32)) for _ in range(min(BATCH, count - start))]
            reservation = await backend.prepare_store(keys, [nbytes] * len(keys))
            wanted = [key for key, outcome in zip(keys, reservation.outcomes, strict=True) if outcome is None]
            outcomes = await backend.store(wanted, [buffer] * len(wanted))
            await reservation.release()
            stored += outcomes.count(StoreOutcome.STORED)

    await asyncio.to_thread(barrier.wait)
    began = time.time()
    await asyncio.gather(*(work() for _ in range(THREADS)))
    ended = time.time()
    await backend.close()
    return ended - began, stored


def process(options: dict[str, Any], count: int, nbytes: int, barrier: Barrier, results: Any) -> None:
    results.put(asyncio.run(store(DiskOptions.model_validate(options), count, nbytes, barrier)))


def run(folder: Path, processes: int, count: int, nbytes: int, **options: object) -> tuple[float, float]:
    """Return the MiB per second of all processes together, and the stored part of the objects.

    Raises:
        SystemExit: an object is missing although the folder has no capacity, for example because the disk is full.
    """
    root = Path(tempfile.mkdtemp(prefix="disk-capacity-", dir=folder))
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(processes), context.Queue()
    try:
        given = {"path": str(root), **options}
        children = [
            context.Process(target=process, args=(given, count, nbytes, barrier, results)) for _ in range(processes)
        ]
        for child in children:
            child.start()
        ended = [results.get(timeout=600) for _ in children]
        for child in children:
            child.join()
    finally:
        shutil.rmtree(root)
    stored = sum(taken for _, taken in ended)
    if "capacity" not in options and stored < processes * count:
        raise SystemExit(f"only {stored} of {processes * count} objects were stored; is the disk of {folder} full?")
    return stored * nbytes / 2**20 / max(seconds for seconds, _ in ended), stored / (processes * count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", type=Path, help="folder to work in, on the disk to measure; made if missing, no object is left there"
    )
    parser.add_argument("--mib", type=int, default=512, help="MiB that each process stores in a round")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds")
    add_json_option(parser)
    arguments = parser.parse_args()
    written = Run(arguments)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    capacities: list[Capacity] = []
    for nbytes in SIZES:
        count = arguments.mib * 2**20 // nbytes
        free: list[float] = []
        limited: list[float] = []
        taken: list[float] = []
        for _ in range(arguments.rounds):
            free.append(run(arguments.folder, PROCESSES, count, nbytes)[0])
            speed, part = run(arguments.folder, PROCESSES, count, nbytes, capacity=PROCESSES * count * nbytes // 4)
            limited.append(speed)
            taken.append(part)
        one, other = statistics.median(free), statistics.median(limited)
        row = Capacity(
            processes=PROCESSES,
            object_kib=nbytes // 1024,
            rounds=arguments.rounds,
            without_mib_per_second=one,
            with_mib_per_second=other,
            taken_ratio=min(taken),
            ratio=other / one,
        )
        capacities.append(row)
        print(
            f"{row.processes} processes, objects of {row.object_kib} KiB: without a capacity "
            f"{row.without_mib_per_second:.0f} MiB/s, with one {row.with_mib_per_second:.0f} MiB/s "
            f"({row.taken_ratio:.0%} stored), ratio {row.ratio:.2f}",
            flush=True,
        )
    count = arguments.mib * 2**20 // SIZES[0] // 2
    policies: list[Fsync] = []
    for fsync in FSYNCS:
        speeds = [run(arguments.folder, 1, count, SIZES[0], fsync=fsync)[0] for _ in range(arguments.rounds)]
        median = statistics.median(speeds)
        policies.append(
            Fsync(policy=fsync, object_kib=SIZES[0] // 1024, rounds=arguments.rounds, mib_per_second=median)
        )
        print(f"1 process, objects of {SIZES[0] // 1024} KiB, fsync {fsync}: {median:.0f} MiB/s", flush=True)
    written.write(DiskCapacity(capacity=capacities, fsync=policies))


if __name__ == "__main__":
    main()
