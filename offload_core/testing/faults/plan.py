"""When which fault happens to a backend, and what has happened; the faults themselves are in :mod:`.faults`."""

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
"""Operations that answer something per key."""
OPERATIONS = ("open", "delete", *ANSWERS)


@dataclass(frozen=True)
class Call:
    """One call on its way to the backend inside.

    Args:
        operation: one of ``OPERATIONS``.
        keys: the batch.
        buffers: parallel to ``keys`` for ``load_into`` and ``store``, else empty.
        positions: parallel to ``keys``: where each stood in the batch as it came, before outer faults changed it.
        chosen: the indices of ``keys`` that the plan picked for the fault.
        random: the fault's own, seeded.
        backend: the backend inside.
        plan: where :meth:`happened` records.
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
        """Return the call for the other keys only."""
        kept = [index for index in range(len(self.keys)) if index not in indices]
        return replace(self.with_keys(kept), buffers=[self.buffers[index] for index in kept])

    def with_keys(self, order: Sequence[int]) -> Call:
        """Return the call with the keys at the indices ``order``, while the buffers stay."""
        keys, positions = zip(*((self.keys[i], self.positions[i]) for i in order), strict=True) if order else ((), ())
        return replace(self, keys=keys, positions=positions)

    def happened(self, fault: Fault, indices: Sequence[int]) -> None:
        """Record that ``fault`` has changed something for the keys at ``indices``."""
        keys = tuple(self.keys[index] for index in indices)
        self.plan.note(Injected(fault, self.operation, keys))


GoOn = Callable[[Call], Awaitable[list[Any]]]
"""What a fault calls to let the call through: answers per key, an empty list for ``open`` and ``delete``."""


class Fault(ABC):
    """Something that goes wrong around a call. Frozen data; subclass it for faults of your own."""

    operations: ClassVar[Collection[str]] = OPERATIONS
    """Where it can happen."""
    per_object: ClassVar[bool] = True
    """Whether the plan picks keys (``Call.chosen``), or whole calls."""

    @abstractmethod
    async def apply(self, call: Call, go_on: GoOn) -> list[Any]:
        """Do the call wrongly: change it before ``go_on(call)``, or its answers afterwards, or do not let it through.

        Cancellation: see the single faults; buffers are not touched after it has come through (C7).
        """


@dataclass(frozen=True)
class Inject:
    """One entry of a plan.

    Args:
        fault: what goes wrong.
        operation: in which calls: one of ``OPERATIONS`` that the fault knows.
        chance: how likely, per object or per call as the fault has it; 1 is always.
        calls: only in these calls of the operation, counted from 1; ``None`` for all.

    Raises:
        ValueError: the fault cannot happen in that operation, or the chance is no probability.
    """

    fault: Fault
    operation: str
    chance: float = 1.0
    calls: Collection[int] | None = None

    def __post_init__(self) -> None:
        if self.operation not in self.fault.operations:
            known = ", ".join(self.fault.operations)
            raise ValueError(f"{self.fault!r} cannot happen in {self.operation!r}; it can in {known}")
        if not 0 <= self.chance <= 1:
            raise ValueError(f"chance={self.chance} of {self.fault!r} must be between 0 and 1")


@dataclass(frozen=True)
class Injected:
    """What has happened: the fault, the operation, and the keys that it changed something for."""

    fault: Fault
    operation: str
    keys: tuple[ObjectKey, ...]


class FaultPlan:
    """Which faults happen when, and what has happened. One plan may serve several backends.

    All but :meth:`release` is used on the event loop of the backends; ``injected`` and ``active`` from any thread.
    """

    def __init__(self, faults: Sequence[Inject], seed: int = 0) -> None:
        self.faults = tuple(faults)
        self.seed = seed
        self.active = True
        """Set it to ``False`` to let new calls through as they are."""
        self.injected: list[Injected] = []
        """What has happened, in order. What found nothing to do, such as a flipped bit of a miss, is not here."""
        self._calls: Counter[int] = Counter()
        self._seen: Counter[tuple[int, str]] = Counter()
        self._released = False
        self._hanging: set[asyncio.Future[None]] = set()

    def choose(self, call: Call) -> list[tuple[Fault, Call]]:
        """Return the faults of this call, outermost first, each with the call as it is to see it."""
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

    def note(self, injected: Injected) -> None:
        """Record what has happened; called on the event loop of the backends."""
        self.injected.append(injected)

    def release(self) -> None:
        """Let every call go that hangs, and let none hang from now on. Callable from any thread."""
        self._released = True
        for future in list(self._hanging):
            future.get_loop().call_soon_threadsafe(_let_go, future)

    async def wait_for_release(self) -> None:
        """Wait for :meth:`release`. Cancellation ends the wait."""
        if self._released:
            return
        future = asyncio.get_running_loop().create_future()
        self._hanging.add(future)
        try:
            if not self._released:  # it may have come from another thread just now
                await future
        finally:
            self._hanging.discard(future)

    def _indices(self, entry: int, inject: Inject, keys: Sequence[ObjectKey]) -> list[int] | None:
        """Return what the fault is to touch: indices of keys, or ``None`` when it does not happen at all."""
        if not inject.fault.per_object:
            name = "/".join(key.path for key in keys)
            return list(range(len(keys))) if self._random(entry, name).random() < inject.chance else None
        return [i for i, key in enumerate(keys) if self._random(entry, key.path).random() < inject.chance] or None

    def _random(self, entry: int, name: str) -> random.Random:
        self._seen[entry, name] += 1
        return random.Random(f"{self.seed}/{entry}/{name}/{self._seen[entry, name]}")


def _let_go(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
