"""Delay of the engine's thread by loads and stores beside it: on threads of its process, and in the I/O process.

The engine's thread runs steps of 1,500 small torch operations, as a model does between its large ones. After each step
it calls the transfer engine, as the connector does: it submits loads or stores, and copies objects that have arrived.
That time is not part of the step. "Own work" shows it per step.

Loads and stores go to a ``disk`` tier in the page cache, at a given rate. The kernel writes stores out on the same
processors, which is part of a store's cost. Before the next contender it has written all of them (``sync``).

All contenders take turns in every round, and "alone" is measured in each round. A ratio compares a percentile with
that of "alone" in the same round; the table shows the median over rounds. With only two cores, an unlimited rate takes
the second one whole.

    python -m benchmarks.interference [--seconds 4] [--rounds 3] [--folder FOLDER] [--tier disk] [--niceness 0]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from offload_core.api.keys import ObjectKey
from offload_core.api.memory.shared_memory import SharedMemory
from offload_core.config.loading import load_config
from offload_core.io_process.processes import IoProcesses
from offload_core.memory.block_copier import BlockSlice, CpuBlockCopier
from offload_core.memory.canonical import CanonicalKVCaches, LayerPages
from offload_core.memory.payload_layout import PackLayout
from offload_core.memory.staging_pool import StagingPool
from offload_core.memory.staging_size import STORE_SHARE
from offload_core.planning.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.tiers.opening import close_tiers, open_tiers
from offload_core.transfer.batches import TransferObject
from offload_core.transfer.engine import TransferEngine
from offload_core.transfer.loads import LoadJob

KIB, MIB, GIB = 1024, 1024**2, 1024**3
STAGING_BYTES = 256 * MIB
OBJECT_BYTES = (2 * MIB, 256 * KIB)
RATES: tuple[float | None, ...] = (0.25 * GIB, 1.0 * GIB, None)
LOADED_BYTES = 64 * MIB
JOB_BYTES = 8 * MIB
OPERATIONS = 1500
COLUMNS = (
    "", "object", "asked GB/s", "moved GB/s", "where", "p50 ms", "p99 ms", "p50 ratio", "p99 ratio", "own work ms",
)  # fmt: skip

Where = Literal["threads", "process"]
Kind = Literal["loads", "stores"]


class Sample(NamedTuple):
    """One contender in one round.

    Args:
        step_ms: median and 99th percentile of the steps, in milliseconds.
        own_ms: mean of the engine's own work between two steps, in milliseconds.
        rate: bytes per second that were really moved.
    """

    step_ms: tuple[float, float]
    own_ms: float
    rate: float


@dataclass
class Cell:
    """All rounds of one contender."""

    kind: Kind
    object_bytes: int
    asked_rate: float | None
    where: Where
    samples: list[Sample] = field(default_factory=list)
    ratios: list[tuple[float, float]] = field(default_factory=list)


class Engine:
    """A transfer engine over one KV cache, whose tier is on threads or in the I/O process."""

    def __init__(self, io: IoLoop, where: Where, tier: str, folder: Path, object_bytes: int, niceness: int) -> None:
        self.io = io
        self.object_bytes = object_bytes
        self.objects = LOADED_BYTES // object_bytes
        options: dict[str, Any] = {"path": str(folder)} if tier == "disk" else {"url": f"file://{folder}"}
        if tier == "cpu":
            options = {"capacity": "4GiB"}
        mode = "engine" if where == "process" else "off"
        config = load_config(
            {
                "io_process": mode,
                "io_process_niceness": niceness,
                "backends": [{"name": "tier", "type": tier, **options}],
            }
        )
        blocks = torch.randint(-128, 128, (2 * self.objects, object_bytes), dtype=torch.int8)
        caches = CanonicalKVCaches.build([[LayerPages("layer", blocks, len(blocks), object_bytes, object_bytes)]])
        planner = HybridOffloadPlanner.build(
            [GroupGeometry(0, 16, HitPolicy("full"))], hash_block_size=16, max_model_len=1024, hybrid_chunk_size=16
        )
        layouts = {pack.name: PackLayout.build(pack, caches, [0]) for pack in planner.packs}
        (self.pack,) = layouts
        self.counters = Counters()
        self.processes: IoProcesses | None = None
        memory = SharedMemory.create("benchmark", STAGING_BYTES)
        if where == "process":
            self.processes = IoProcesses(f"benchmark {os.getpid()}", io, config)
            self.processes.share_staging(memory)
        self.tiers = open_tiers(config, io, self.counters, host=self.processes)
        self.engine = TransferEngine(
            io=io,
            tiers=self.tiers,
            staging=StagingPool(STAGING_BYTES, STORE_SHARE, arena=memory.view),
            copier=CpuBlockCopier(caches),
            layouts=layouts,
            counters=self.counters,
            processes=self.processes,
        )
        self._next = self._job = 0
        for _ in range(self.objects):
            self.engine.submit_stores([self.new_object()])
            self.engine.drain_stores(10)
        self.in_flight = 0

    def new_object(self) -> TransferObject:
        """Return an object that is not stored yet."""
        self._next += 1
        return self._object(self._next - 1, self._next % self.objects)

    def _object(self, number: int, block: int) -> TransferObject:
        key = ObjectKey("ab" * 32, self.pack, number.to_bytes(32, "big"))
        return TransferObject(key, (BlockSlice(0, (block,)),))

    def work(self, kind: Kind, may_submit_bytes: float) -> int:
        """Do the connector's work between two steps; returns the bytes that were submitted."""
        self.in_flight -= len(self.engine.poll())
        self.engine.take_store_results()
        submitted = 0
        while submitted + JOB_BYTES <= may_submit_bytes and self.in_flight < 4:
            count = JOB_BYTES // self.object_bytes
            submitted += JOB_BYTES
            if kind == "loads":
                first = self._job * count
                self._job += 1
                numbers = ((first + index) % self.objects for index in range(count))
                objects = tuple(self._object(number, self.objects + number) for number in numbers)
                self.engine.submit_load(LoadJob(self._job, "tier", objects))
                self.in_flight += 1
            else:
                self.engine.submit_stores([self.new_object() for _ in range(count)])
                break  # the copies of one step are bounded by what a step computes
        return submitted

    def moved_bytes(self) -> float:
        """Return the bytes moved since the last call."""
        counts = self.counters.take()
        return counts.get(("load_bytes", "tier"), 0) + counts.get(("store_bytes", "tier"), 0)

    def close(self) -> None:
        """End it all."""
        while self.engine.has_active_loads:
            self.engine.wait_for_arrival(0.01)
            self.engine.poll()
        self.engine.drain_stores(10)
        self.engine.close()
        close_tiers(self.tiers, self.io, 5)
        if self.processes is not None:
            self.processes.release(5)


def step(tensor: torch.Tensor) -> None:
    """Launch small operations, whose cost is Python's and torch's own."""
    for _ in range(OPERATIONS):
        tensor.add_(1)


def measure(seconds: float, between: Callable[[float], None]) -> tuple[tuple[float, float], float]:
    """Run steps for ``seconds``; ``between`` gets the seconds since the last call, and may do work."""
    tensor = torch.zeros(64)
    steps, own = [], []
    started = last = time.perf_counter()
    while last - started < seconds:
        begin = time.perf_counter()
        step(tensor)
        end = time.perf_counter()
        between(end - last)
        last = time.perf_counter()
        steps.append((end - begin) * 1000)
        own.append((last - end) * 1000)
    return (float(np.percentile(steps, 50)), float(np.percentile(steps, 99))), statistics.fmean(own)


@contextmanager
def engine(where: Where, tier: str, folder: Path, object_bytes: int, niceness: int) -> Iterator[Engine]:
    """Run an engine."""
    io = IoLoop.acquire()
    made = Engine(io, where, tier, folder, object_bytes, niceness)
    try:
        yield made
    finally:
        made.close()
        io.release()


def run(cell: Cell, seconds: float, tier: str, root: Path, niceness: int) -> Sample:
    """Measure one contender once."""
    with (
        tempfile.TemporaryDirectory(dir=root) as folder,
        engine(cell.where, tier, Path(folder), cell.object_bytes, niceness) as made,
    ):
        allowed = 0.0

        def between(elapsed: float) -> None:
            nonlocal allowed
            allowed = min(allowed + elapsed * (cell.asked_rate or 64 * GIB), 4 * JOB_BYTES)
            allowed -= made.work(cell.kind, allowed)

        measure(0.5, between)
        if cell.kind == "loads":
            os.sync()
        made.moved_bytes()
        started = time.perf_counter()
        step_ms, own_ms = measure(seconds, between)
        return Sample(step_ms, own_ms, made.moved_bytes() / (time.perf_counter() - started))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tier", choices=("disk", "cpu", "nfs"), default="disk")
    parser.add_argument("--only", choices=("loads", "stores"))
    parser.add_argument("--niceness", type=int, default=0, help="niceness of the I/O process")
    parser.add_argument("--folder", type=Path, help="folder for the tier, on the device to measure")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kinds: tuple[Kind, ...] = ("loads", "stores") if arguments.only is None else (arguments.only,)
    wheres: tuple[Where, ...] = ("threads", "process")
    cells = [
        Cell(kind, nbytes, rate, where)
        for kind in kinds
        for nbytes in OBJECT_BYTES
        for rate in RATES
        for where in wheres
    ]
    alone: list[tuple[float, float]] = []
    console = Console()
    for number in range(arguments.rounds):
        for cell in cells:
            os.sync()
            before, _ = measure(arguments.seconds / 2, lambda elapsed: None)
            alone.append(before)
            root = arguments.folder or Path(tempfile.gettempdir())
            sample = run(cell, arguments.seconds, arguments.tier, root, arguments.niceness)
            cell.samples.append(sample)
            cell.ratios.append((sample.step_ms[0] / before[0], sample.step_ms[1] / before[1]))
        console.print(f"round {number + 1} of {arguments.rounds} is done")
    p50, p99 = (statistics.median(values) for values in zip(*alone, strict=True))
    table = Table(title=f"Steps of {OPERATIONS} operations; alone: p50 {p50:.2f} ms, p99 {p99:.2f} ms")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for cell in cells:
        table.add_row(
            cell.kind,
            f"{cell.object_bytes // KIB} KiB",
            "any" if cell.asked_rate is None else f"{cell.asked_rate / GIB:g}",
            f"{statistics.median(sample.rate for sample in cell.samples) / GIB:.2f}",
            cell.where,
            *(f"{statistics.median(sample.step_ms[index] for sample in cell.samples):.2f}" for index in (0, 1)),
            *(f"{statistics.median(ratio[index] for ratio in cell.ratios):.2f}" for index in (0, 1)),
            f"{statistics.median(sample.own_ms for sample in cell.samples):.2f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
