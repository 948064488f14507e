"""Plugin of live engines in benchmarks: it injects faults into one tier's medium on command.

The plugin lies in the engine's process, where :mod:`benchmarks.faults_rig` turns the fault on and off.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from offload_core.api.backend import Backend
from offload_core.api.events import Event, LoadsEnded
from offload_core.api.hooks import TierInfo, hookimpl
from offload_core.testing.faults.faulty_backend import FaultyBackend
from offload_core.testing.faults.kinds import Hang, Slow
from offload_core.testing.faults.plan import ANSWERS, Call, Fault, FaultPlan, GoOn, Inject

OFFLOAD_API_VERSION = 1
VICTIM = "victim"
"""Name of the tier that gets the faults."""

_backends: list[FaultyBackend] = []
_loads: deque[LoadsEnded] = deque()


def slow(seconds: float) -> list[Inject]:
    """Return faults that delay the start of every call; a batch with a reservation pays once."""
    return _everywhere(Slow(seconds), ("contains", "load_into", "store", "delete"))


def far(seconds: float, bytes_per_second: float) -> list[Inject]:
    """Return faults that delay lookups and loads, and let loads share a link of this speed."""
    link = Link(bytes_per_second)
    return [*_everywhere(Slow(seconds), ("contains", "load_into")), Inject(link, "load_into")]


@dataclass(frozen=True)
class Link(Fault):
    """The bytes of all calls arrive one after the other, at ``bytes_per_second``."""

    bytes_per_second: float
    free_at: list[float] = field(default_factory=lambda: [0.0])
    """The time at which the bytes of all earlier calls have arrived, by the monotonic clock."""
    operations: ClassVar[Collection[str]] = ("load_into",)
    per_object: ClassVar[bool] = False

    async def apply(self, call: Call, go_on: GoOn) -> list[Any]:
        """See :meth:`Fault.apply`."""
        nbytes = sum(map(len, call.buffers))
        self.free_at[0] = max(self.free_at[0], time.monotonic()) + nbytes / self.bytes_per_second
        await asyncio.sleep(self.free_at[0] - time.monotonic())
        return await go_on(call)


def hung() -> list[Inject]:
    """Return faults that let no call return or be cancelled, as in a dead mount."""
    return _everywhere(Hang(deaf=True), (*ANSWERS, "delete"))


def inject(faults: Sequence[Inject]) -> None:
    """Give new calls these faults from now on, and release the hung calls."""
    for backend in _backends:
        before, backend.plan = backend.plan, FaultPlan(faults)
        before.release()


def take_loads() -> list[LoadsEnded]:
    """Return the events since the last call: batches of loads of all tiers, in order."""
    return [_loads.popleft() for _ in range(len(_loads))]


def _everywhere(fault: Fault, operations: Sequence[str]) -> list[Inject]:
    return [Inject(fault, operation) for operation in operations]


@hookimpl
def offload_wrap_backend(backend: Backend[Any], tier: TierInfo) -> Backend[Any] | None:
    if tier.name != VICTIM:
        return None
    _backends.append(FaultyBackend(backend, FaultPlan([])))
    return _backends[-1]


@hookimpl
def offload_observe(event: Event) -> None:
    if isinstance(event, LoadsEnded):
        _loads.append(event)
