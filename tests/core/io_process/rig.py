"""Tiers in a real I/O process, with staging memory that the test fills and reads."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from offload_core.api.backend import LoadOutcome
from offload_core.api.keys import ObjectKey
from offload_core.api.memory.shared_memory import SharedMemory
from offload_core.config.loading import load_config
from offload_core.config.model import OffloadConfig
from offload_core.io_process.process import IoProcess
from offload_core.io_process.processes import IoProcesses
from offload_core.memory.staging_pool import Lease, StagingPool
from offload_core.memory.staging_shares import share_out
from offload_core.memory.staging_size import StagingUse
from offload_core.objects.format import HEADER_BYTES
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.tiers.opening import close_tiers, open_tiers
from offload_core.tiers.staged_object import StagedObject
from offload_core.tiers.tier import Tier
from tests.support.polling import wait_until

SECONDS = 30
STAGING_BYTES = 8 << 20
OBJECT_BYTES = 64 << 10
T = TypeVar("T")
Ended = Callable[[T], None]
Start = Callable[[Sequence[StagedObject], Ended[T]], bool]


def key(number: int) -> ObjectKey:
    return ObjectKey("ab" * 32, "full-u16", number.to_bytes(32, "big"))


def content(number: int) -> bytes:
    return bytes([number % 251 + 1]) * (OBJECT_BYTES - HEADER_BYTES)


class Rig:
    """The tiers of a configuration.

    Args:
        shares_staging: whether the process gets the staging memory now; otherwise call :meth:`share_staging`.
    """

    def __init__(
        self,
        io: IoLoop,
        config: OffloadConfig,
        engine: str = f"test {os.getpid()}",
        half: str = "",
        *,
        shares_staging: bool = True,
    ) -> None:
        self.io = io
        self.config = config
        self.counters = Counters()
        self.processes = IoProcesses(engine, io, config)
        self.tiers: list[Tier] = []
        try:
            self.memory = SharedMemory.create("test", STAGING_BYTES)
            if shares_staging:
                self.share_staging()
            self.tiers = open_tiers(config, io, self.counters, half=half, host=self.processes)
        except BaseException:
            self.processes.release(SECONDS)
            raise
        self.pool = StagingPool(STAGING_BYTES, 0.5, arena=self.memory.view)

    @classmethod
    def of(
        cls, io: IoLoop, *backends: dict[str, Any], half: str = "", shares_staging: bool = True, **settings: Any
    ) -> Rig:
        """Open the tiers of a configuration with these entries of ``backends``."""
        config = load_config({"io_process": "engine", **settings, "backends": list(backends)})
        return cls(io, config, half=half, shares_staging=shares_staging)

    def share_staging(self) -> None:
        """Let the process map the staging memory."""
        self.processes.share_staging(self.memory)

    @property
    def process(self) -> IoProcess:
        (process,) = self.processes.all
        return process

    @property
    def pid(self) -> int:
        """The process that serves, waited for if it is being replaced."""
        wait_until(lambda: self.process.pid is not None, "there is no I/O process")
        assert self.process.pid is not None
        return self.process.pid

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.io.submit(coroutine).result(SECONDS)

    def begin(self, start: Start[T], staged: Sequence[StagedObject]) -> Future[T]:
        """Start a load or a store. The I/O loop takes its end if nobody else does."""
        ended: Future[T] = Future()
        if not start(staged, ended.set_result):
            ended.cancel()
        return ended

    def moved(self, start: Start[T], staged: Sequence[StagedObject]) -> T | None:
        """Make a load or a store, as the engine's thread does; ``None`` if it was refused."""
        ended = self.begin(start, staged)
        self.receive_until(ended.done)
        return None if ended.cancelled() else ended.result()

    def receive_until(self, done: Callable[[], bool]) -> None:
        """Take the ends of calls, as the engine's thread does."""
        limit = time.monotonic() + SECONDS
        while not done():
            assert time.monotonic() < limit, "a call has not ended"
            self.processes.wait(0.05)
            self.processes.receive()

    def lease(self) -> Lease:
        lease = self.pool.try_acquire(OBJECT_BYTES, for_store=True)
        assert lease is not None
        return lease

    def sealed(self, *numbers: int) -> list[StagedObject]:
        staged = [StagedObject(key(number), self.lease()) for number in numbers]
        for item, number in zip(staged, numbers, strict=True):
            item.lease.view[HEADER_BYTES:] = content(number)
        self.wait(self.processes.seal(staged))
        return staged

    def store(self, *numbers: int, tier: int = 0) -> list[bool]:
        staged = self.sealed(*numbers)
        try:
            return list(self.moved(self.tiers[tier].start_store, staged) or [False] * len(staged))
        finally:
            _release(staged)

    def share_out(self) -> None:
        """Give every tier its share of the staging memory, as the transfer engine does."""
        uses = {tier.name: StagingUse(encodes=tier.encodes) for tier in self.tiers}
        for name, share in share_out(self.pool, uses, OBJECT_BYTES).items():
            (tier,) = (tier for tier in self.tiers if tier.name == name)
            tier.staging = share

    def load(self, *numbers: int, tier: int = 0, scratch: bool = False) -> list[LoadOutcome | None]:
        """Load objects, and check the bytes of those that were found.

        Args:
            scratch: whether each object comes with a second lease, as for a tier that compresses.
        """
        staged = [StagedObject(key(number), self.lease(), self.lease() if scratch else None) for number in numbers]
        try:
            outcomes = list(self.moved(self.tiers[tier].start_load, staged) or [None] * len(staged))
            for number, item, outcome in zip(numbers, staged, outcomes, strict=True):
                if outcome is LoadOutcome.HIT:
                    assert item.lease.view[HEADER_BYTES:] == content(number), "I1"
            return outcomes
        finally:
            _release(staged)

    def lookup(self, *numbers: int, tier: int = 0) -> list[bool]:
        return self.wait(self.tiers[tier].lookup([key(number) for number in numbers]))

    def settle(self) -> None:
        """Wait until the loop has handled what is under way."""
        self.wait(asyncio.sleep(0))

    def close(self) -> None:
        close_tiers(self.tiers, self.io, SECONDS)
        self.processes.release(SECONDS)
        assert self.pool.used_bytes == 0, "a lease was kept"


def _release(staged: Sequence[StagedObject]) -> None:
    for item in staged:
        item.lease.release()
        if item.scratch is not None:
            item.scratch.release()
