"""Contender of ``benchmarks/backends.py``: one of our tiers in the I/O process, as engines use it by default."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
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
from offload_core.transfer.call_size import MESSAGE_BATCHES

_CLOSE_SECONDS = 10.0

Ended = Callable[[Sequence[LoadOutcome | None] | Sequence[bool]], None]
Start = Callable[[Sequence[StagedObject], Ended], bool]


class OurProcess(OurTier):
    """A tier in the I/O process. One thread of this process sends the calls and takes their ends, as the engine's does.

    Processor time is that of both processes.
    """

    def __init__(self, name: str, memory: Memory, chunks: int, payload_bytes: int, backend: dict[str, Any]) -> None:
        self._memory = memory
        super().__init__(name, memory, chunks, payload_bytes, backend | {"name": "bench"})

    def _config(self, backend: dict[str, Any]) -> OffloadConfig:
        return load_config({"io_process": "engine", "backends": [backend]})

    def _open(self, config: OffloadConfig) -> Tier:
        self._processes = IoProcesses(f"benchmark {os.getpid()}", self._io, config)
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
        clock = (~process.pid << 3) | 2  # the processor time of a process, as clock_getcpuclockid(3) makes it
        before = time.clock_gettime(clock)
        sample = move()
        return replace(sample, cpu_seconds=sample.cpu_seconds + time.clock_gettime(clock) - before)

    def _store_objects(self, objects: list[StagedObject]) -> None:
        ends = self._move(self._tier.start_store, [replace(one, unsealed=True) for one in objects], self._threads + 1)
        if set(ends) != {True}:
            raise SystemExit(f"{self.name}: the tier did not store some objects")

    def _load_objects(self, objects: list[StagedObject]) -> None:
        ends = self._move(self._tier.start_load, objects, 2 * self._threads)
        if set(ends) != {LoadOutcome.HIT}:
            raise SystemExit(f"{self.name}: the tier did not load some objects: {set(ends)}")

    def _move(self, start: Start, objects: list[StagedObject], slots: int) -> list[Any]:
        """Move objects in calls of several batches, as many at once as there are slots, and return their ends."""
        batches = self._batches(objects)
        size = max(1, min(MESSAGE_BATCHES, -(-len(batches) // slots)))
        calls = deque(
            [one for batch in batches[first : first + size] for one in batch] for first in range(0, len(batches), size)
        )
        ends: list[Sequence[Any]] = []
        begun = 0
        while calls or len(ends) < begun:
            while calls and begun - len(ends) < slots:
                if not start(calls.popleft(), ends.append):
                    raise SystemExit(f"{self.name}: the tier refused a call")
                begun += 1
            self._processes.receive()
            if len(ends) < begun and not (calls and begun - len(ends) < slots):
                self._processes.wait(1.0)
        return [one for end in ends for one in end]

    def _delete(self, objects: list[StagedObject]) -> None:
        self._io.submit(self._tier._storage.delete([staged.key for staged in objects])).result()

    def close(self) -> None:
        self._io.submit(self._tier.close()).result()
        self._processes.release(_CLOSE_SECONDS)
        super()._end()
