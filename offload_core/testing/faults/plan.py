"""A plan of faults: it picks the calls that a fault hits, and records the faults that happened.

The faults themselves are in :mod:`offload_core.testing.faults.kinds`.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from offload_core.api.backend import Backend
from offload_core.api.keys import ObjectKey

ANSWERS = ("contains", "load_into", "store", "prepare_load", "prepare_store")
"""Operations that return one answer per key."""
OPERATIONS = ("open", "delete", *ANSWERS)


@dataclass(frozen=True)
class Call:
    """One call on its way to the inner backend.

    Args:
        operation: one of ``OPERATIONS``.
        keys: the batch.
        buffers: parallel to ``keys`` for ``load_into`` and ``store``, else empty.
        backend: the inner backend.
        plan: the plan that :meth:`record` writes to.
        positions: parallel to ``keys``: each key's index in the original batch, before outer faults changed it.
        chosen: the indices of ``keys`` that the plan picked for the fault.
        random: the fault's own seeded generator.
    """

    operation: str
    keys: Sequence[ObjectKey]
    buffers: Sequence[memoryview]
    backend: Backend[Any]
    plan: FaultPlan
    positions: Sequence[int]
    chosen: Sequence[int] = ()
    random: random.Random = field(default_factory=random.Random)

    def without(self, indices: Collection[int]) -> Call:
        """Return the call without the keys and buffers at ``indices``."""
        kept = [index for index in range(len(self.keys)) if index not in indices]
        return replace(self.with_keys(kept), buffers=[self.buffers[index] for index in kept])

    def with_keys(self, order: Sequence[int]) -> Call:
        """Return the call with the keys at the indices ``order``, while the buffers stay."""
        keys, positions = zip(*((self.keys[i], self.positions[i]) for i in order), strict=True) if order else ((), ())
        return replace(self, keys=keys, positions=positions)

    def record(self, fault: Fault, indices: Sequence[int]) -> None:
        """Record that ``fault`` has changed the call for the keys at ``indices``."""
        keys = tuple(self.keys[index] for index in indices)
        self.plan.record(Injected(fault, self.operation, keys))


GoOn = Callable[[Call], Awaitable[list[Any]]]
"""Function that lets a call through; it returns answers per key, or an empty list for ``open`` and ``delete``."""


class Fault(ABC):
    """A fault of a call. It is frozen data; subclass it for faults of your own."""

    operations: ClassVar[Collection[str]] = OPERATIONS
    """Operations that the fault can hit."""
    per_object: ClassVar[bool] = True
    """True if the plan picks single keys (``Call.chosen``), false if it picks whole calls."""

    @abstractmethod
    async def apply(self, call: Call, go_on: GoOn) -> list[Any]:
        """Run the call with the fault: change the call before ``go_on(call)``, change the answers, or block the call.

        Cancellation: see the single faults. A cancelled call that has ended does not touch its buffers any more (C7).
        """


@dataclass(frozen=True)
class Inject:
    """One entry of a plan.

    Args:
        fault: the fault to inject.
        operation: the operation to hit, one of the fault's ``operations``.
        chance: the probability per object or per call, as the fault's ``per_object`` says; 1 is always.
        calls: the calls of the operation to hit, counted from 1; ``None`` for all calls.

    Raises:
        ValueError: the fault cannot happen in that operation, or the chance is no probability.
    """

    fault: Fault
    operation: str
    chance: float = 1.0
    calls: Collection[int] | None = None

    def __post_init__(self) -> None:
        if self.operation not in self.fault.operations:
            possible = ", ".join(self.fault.operations)
            raise ValueError(f"{self.fault!r} cannot happen in {self.operation!r}; it can happen in {possible}")
        if not 0 <= self.chance <= 1:
            raise ValueError(f"chance={self.chance} of {self.fault!r} must be between 0 and 1")


@dataclass(frozen=True)
class Injected:
    """A fault that has happened: the fault, the operation, and the affected keys."""

    fault: Fault
    operation: str
    keys: tuple[ObjectKey, ...]


class FaultPlan:
    """The faults to inject, and the record of those that happened. One plan may serve several backends.

    Use ``injected``, ``active`` and :meth:`release` from any thread, all else on the event loop of the backends.
    """

    def __init__(self, faults: Sequence[Inject], seed: int = 0) -> None:
        self.faults = tuple(faults)
        self.seed = seed
        self.active = True
        """False lets new calls through without faults."""
        self.injected: list[Injected] = []
        """Faults that happened, in order. A fault without effect, such as a flipped bit of a miss, is not recorded."""
        self._calls: Counter[int] = Counter()
        self._draws: Counter[tuple[int, str]] = Counter()
        self._released = False
        self._hanging: set[asyncio.Future[None]] = set()

    def choose(self, call: Call) -> list[tuple[Fault, Call]]:
        """Return the faults of this call, outermost first, each with its own view of the call."""
        if not self.active:
            return []
        chosen: list[tuple[Fault, Call]] = []
        for entry, inject in enumerate(self.faults):
            if inject.operation != call.operation:
                continue
            self._calls[entry] += 1
            if inject.calls is not None and self._calls[entry] not in inject.calls:
                continue
            indices = self._indices(entry, inject, call.keys)
            if indices is not None:
                name = f"{call.operation}/{'/'.join(key.path for key in call.keys)}"
                chosen.append((inject.fault, replace(call, chosen=indices, random=self._random(entry, name))))
        return chosen

    def record(self, injected: Injected) -> None:
        """Record a fault that has happened; called on the event loop of the backends."""
        self.injected.append(injected)

    def release(self) -> None:
        """Release every hanging call, and let no call hang from now on. Callable from any thread."""
        self._released = True
        for future in list(self._hanging):
            future.get_loop().call_soon_threadsafe(_resolve, future)

    async def wait_for_release(self) -> None:
        """Wait for :meth:`release`. Cancellation ends the wait."""
        if self._released:
            return
        future = asyncio.get_running_loop().create_future()
        self._hanging.add(future)
        try:
            if not self._released:  # another thread may have released it just now
                await future
        finally:
            self._hanging.discard(future)

    def _indices(self, entry: int, inject: Inject, keys: Sequence[ObjectKey]) -> list[int] | None:
        """Return the indices of the keys that the fault hits, or ``None`` if it does not happen at all."""
        if not inject.fault.per_object:
            name = "/".join(key.path for key in keys)
            return list(range(len(keys))) if self._random(entry, name).random() < inject.chance else None
        return [i for i, key in enumerate(keys) if self._random(entry, key.path).random() < inject.chance] or None

    def _random(self, entry: int, name: str) -> random.Random:
        self._draws[entry, name] += 1
        return random.Random(f"{self.seed}/{entry}/{name}/{self._draws[entry, name]}")


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
