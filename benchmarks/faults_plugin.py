"""Plugin of live engines in benchmarks: it injects faults into one tier's medium on command.

The faults and the events are where the tiers run, by default in the I/O process. There a thread serves a socket, whose
address is in an environment variable. The engine's process sends it the commands of :mod:`benchmarks.live_engines`.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
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
ADDRESS = "OFFLOAD_BENCHMARK_FAULTS"
"""The variable with the address of the socket, in the environment of the engine's process."""

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


KINDS: Mapping[str, Callable[..., Sequence[Inject]]] = {"none": list, "slow": slow, "hung": hung, "far": far}
"""The faults by name, each with the numbers that it takes."""


def inject(kind: str, *numbers: float) -> None:
    """Give new calls this fault from now on, and release the hung calls."""
    _tell((kind, *numbers))


def take_loads() -> list[LoadsEnded]:
    """Return the events since the last call: batches of loads of all tiers, in order."""
    return _tell(())


def _tell(command: tuple[str | float, ...]) -> list[LoadsEnded]:
    """Send a command and return the answer. An engine without tiers has no socket, and nothing happens there."""
    if not Path(os.environ[ADDRESS]).exists():
        return []
    connection = _connection()
    connection.send(command)
    loads: list[LoadsEnded] = connection.recv()
    return loads


@cache
def _connection() -> Connection[Any, Any]:
    return Client(os.environ[ADDRESS])


# The functions below run in the process of the tiers.


@cache
def _start() -> None:
    """Serve the commands, from the first tier on."""
    listener = Listener(os.environ[ADDRESS])
    threading.Thread(target=_serve, args=(listener,), name="benchmark faults", daemon=True).start()


def _serve(listener: Listener) -> None:
    with listener.accept() as connection:
        while True:
            try:
                connection.send(_obey(*connection.recv()))
            except EOFError:
                return


def _obey(kind: str = "", *numbers: float) -> list[LoadsEnded]:
    """Inject a fault, or return the events if there is none."""
    if not kind:
        return [_loads.popleft() for _ in range(len(_loads))]
    faults = KINDS[kind](*numbers)
    for backend in _backends:
        before, backend.plan = backend.plan, FaultPlan(faults)
        before.release()
    return []


def _everywhere(fault: Fault, operations: Sequence[str]) -> list[Inject]:
    return [Inject(fault, operation) for operation in operations]


@hookimpl
def offload_wrap_backend(backend: Backend[Any], tier: TierInfo) -> Backend[Any] | None:
    _start()
    if tier.name != VICTIM:
        return None
    _backends.append(FaultyBackend(backend, FaultPlan([])))
    return _backends[-1]


@hookimpl
def offload_observe(event: Event) -> None:
    if isinstance(event, LoadsEnded):
        _loads.append(event)
