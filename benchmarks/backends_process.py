"""Contender of ``benchmarks/backends.py``: one of our tiers in the I/O process, as engines use it by default."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.backends_rig import Memory, OurTier, Sample
from offload_core.api.backend import LoadOutcome
from offload_core.config.loading import load_config
from offload_core.config.model import OffloadConfig
from offload_core.io_process.processes import IoProcesses
from offload_core.runtime.metrics import Counters
from offload_core.tiers.opening import open_tiers
from offload_core.tiers.staged_object import StagedObject
from offload_core.tiers.tier import Tier
from offload_core.transfer.call_size import CallSize, large_calls_in, store_slots_of

_CLOSE_SECONDS = 10.0

Ended = Callable[[Sequence[LoadOutcome | None] | Sequence[bool]], None]
Start = Callable[[Sequence[StagedObject], Ended], bool]


class OurProcess(OurTier):
    """A tier in the I/O process. One thread of this process sends the calls and takes their ends, as the engine's does.

    Processor time is that of both processes, and of the children of the I/O process, such as NIXL's.
    """

    def __init__(self, name: str, memory: Memory, chunks: int, payload_bytes: int, backend: dict[str, Any]) -> None:
        self._memory = memory
        super().__init__(name, memory, chunks, payload_bytes, backend)

    def _config(self, backend: dict[str, Any]) -> OffloadConfig:
        return load_config({"io_process": "engine", "backends": [backend]})

    def _open(self, config: OffloadConfig) -> Tier:
        self._processes = IoProcesses(f"benchmark {os.getpid()} {config.tiers[0].common.name}", self._io, config)
        self._processes.share_staging(self._memory.shared)
        (tier,) = open_tiers(config, self._io, Counters(), host=self._processes)
        return tier

    def store(self, number: int) -> Sample:
        return self._both(partial(super().store, number))

    def load(self, number: int) -> Sample:
        return self._both(partial(super().load, number))

    def _both(self, move: Callable[[], Sample]) -> Sample:
        (process,) = self._processes.all
        assert process.pid is not None
        before = _cpu_seconds(process.pid)
        sample = move()
        return replace(sample, cpu_seconds=sample.cpu_seconds + _cpu_seconds(process.pid) - before)

    def _store_objects(self, objects: list[StagedObject]) -> None:
        unsealed = [replace(one, unsealed=True) for one in objects]
        slots = large_calls_in(self._tier, store_slots_of(self._tier))
        ends = self._move(self._tier.start_store, unsealed, slots, self._store_size)
        if set(ends) != {True}:
            raise SystemExit(f"{self.name}: the tier did not store some objects")

    def _load_objects(self, objects: list[StagedObject]) -> None:
        ends = self._move(self._tier.start_load, objects, self._load_slots.slots, self._load_size)
        if set(ends) != {LoadOutcome.HIT}:
            raise SystemExit(f"{self.name}: the tier did not load some objects: {set(ends)}")

    def _move(self, start: Start, objects: list[StagedObject], slots: int, size: CallSize) -> list[Any]:
        """Move objects in calls as large as the engine's, as many at once as there are slots, and return their ends."""
        left = deque(self._batches(objects))
        fair = -(-len(left) // 2)
        ends: list[Any] = []
        running = 0

        def ended(batches: int, started: float, end: Sequence[Any]) -> None:
            nonlocal running
            running -= 1
            size.ended(batches, time.monotonic() - started, worked=True)
            ends.extend(end)

        while left or running:
            while left and running < slots:
                count = size.take((sum(one.lease.nbytes for one in batch) for batch in left), fair)
                call = [staged for _ in range(count) for staged in left.popleft()]
                if not start(call, partial(ended, count, time.monotonic())):
                    raise SystemExit(f"{self.name}: the tier refused a call")
                running += 1
            self._processes.receive()
            if running and not (left and running < slots):
                self._processes.wait(1.0)
        return ends

    def _delete(self, objects: list[StagedObject]) -> None:
        self._io.submit(self._tier._storage.delete([staged.key for staged in objects])).result()

    def close(self) -> None:
        self._io.submit(self._tier.close()).result()
        self._processes.release(_CLOSE_SECONDS)
        super()._end()


def _cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and its living children."""
    clock = (~pid << 3) | 2  # the processor time of a process, as clock_getcpuclockid(3) makes it
    children = {child for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()}
    return time.clock_gettime(clock) + sum(_cpu_seconds(int(child)) for child in children)
