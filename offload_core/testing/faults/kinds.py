"""The kinds of fault: small classes that compose, each for certain operations of a backend."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.api.cancellation import to_the_end
from offload_core.testing.faults.plan import ANSWERS, Call, Fault, GoOn


@dataclass(frozen=True)
class Slow(Fault):
    """The call starts ``seconds`` late. Cancellation ends the wait."""

    seconds: float
    per_object: ClassVar[bool] = False

    async def apply(self, call: Call, go_on: GoOn) -> list[Any]:
        """See :meth:`Fault.apply`."""
        call.record(self, call.chosen)
        await asyncio.sleep(self.seconds)
        return await go_on(call)


@dataclass(frozen=True)
class Hang(Fault):
    """The call does not start until :meth:`FaultPlan.release`, or until the backend is closed.

    Args:
        deaf: hold a cancellation back until then, as a thread in a dead mount does. Otherwise cancellation ends the
            wait.
    """

    deaf: bool = False
    per_object: ClassVar[bool] = False

    async def apply(self, call: Call, go_on: GoOn) -> list[Any]:
        """See :meth:`Fault.apply`."""
        call.record(self, call.chosen)
        released = call.plan.wait_for_release()
        await (to_the_end(released) if self.deaf else released)
        return await go_on(call)


@dataclass(frozen=True)
class Stall(Fault):
    """One of the tier's own threads hangs for ``seconds`` before the call starts, as in a mount that is stuck.

    Calls that find no free thread wait behind it. The fault holds a cancellation back until its end.
    """

    seconds: float
    per_object: ClassVar[bool] = False

    async def apply(self, call: Call, go_on: GoOn) -> list[Any]:
        """See :meth:`Fault.apply`."""
        call.record(self, call.chosen)
        await call.backend.run_blocking(time.sleep, self.seconds)
        return await go_on(call)


@dataclass(frozen=True)
class Late(Fault):
    """The call keeps its buffers for ``seconds`` and then runs. It holds a cancellation back until its end."""

    seconds: float
    per_object: ClassVar[bool] = False

    async def apply(self, call: Call, go_on: GoOn) -> list[Any]:
        """See :meth:`Fault.apply`."""
        call.record(self, call.chosen)
        return await to_the_end(self._late(call, go_on))

    async def _late(self, call: Call, go_on: GoOn) -> list[Any]:
        await asyncio.sleep(self.seconds)
        return await go_on(call)


@dataclass(frozen=True)
class Fail(Fault):
    """The call raises ``OSError`` of the given ``errno``.

    Args:
        error: an error number of :mod:`errno`.
        after: do the work first, so that only the answer is lost.
    """

    error: int
    after: bool = False
    per_object: ClassVar[bool] = False

    async def apply(self, call: Call, go_on: GoOn) -> list[Any]:
        """See :meth:`Fault.apply`."""
        if self.after:
            await go_on(call)
        call.record(self, call.chosen)
        raise OSError(self.error, f"{os.strerror(self.error)} (injected into {call.operation})")


@dataclass(frozen=True)
class Full(Fault):
    """The medium is full: ``prepare_store`` answers ``REJECTED``, for stored objects too."""

    operations: ClassVar[Collection[str]] = ("prepare_store",)

    async def apply(self, call: Call, go_on: GoOn) -> list[Any]:
        """See :meth:`Fault.apply`."""
        outcomes = await go_on(call)
        call.record(self, call.chosen)
        return [StoreOutcome.REJECTED if index in call.chosen else outcome for index, outcome in enumerate(outcomes)]


@dataclass(frozen=True)
class Lie(Fault):
    """The medium answers yes without doing anything.

    - ``contains`` and ``prepare_load`` say that the object is there.
    - ``load_into`` says ``HIT`` and fills no buffer.
    - ``store`` says ``STORED`` and keeps no object.
    - ``prepare_store`` says ``ALREADY_PRESENT``.
    """

    operations: ClassVar[Collection[str]] = ANSWERS
    _ANSWERS: ClassVar[dict[str, Any]] = {
        "contains": True,
        "prepare_load": True,
        "load_into": LoadOutcome.HIT,
        "store": StoreOutcome.STORED,
        "prepare_store": StoreOutcome.ALREADY_PRESENT,
    }

    async def apply(self, call: Call, go_on: GoOn) -> list[Any]:
        """See :meth:`Fault.apply`."""
        lie = self._ANSWERS[call.operation]
        if call.operation in ("load_into", "store"):
            rest = iter(await go_on(call.without(call.chosen)))
            call.record(self, call.chosen)
            return [lie if index in call.chosen else next(rest) for index in range(len(call.keys))]
        truth = await go_on(call)
        wrong = [index for index in call.chosen if truth[index] != lie]
        if wrong:
            call.record(self, wrong)
        return [lie if index in call.chosen else answer for index, answer in enumerate(truth)]


@dataclass(frozen=True)
class Lose(Fault):
    """The object vanishes right after ``contains`` or ``prepare_load`` has found it, even if it is pinned."""

    operations: ClassVar[Collection[str]] = ("contains", "prepare_load")

    async def apply(self, call: Call, go_on: GoOn) -> list[Any]:
        """See :meth:`Fault.apply`."""
        there = await go_on(call)
        lost = [index for index in call.chosen if there[index]]
        if lost:
            await call.backend.delete([call.keys[index] for index in lost])
            call.record(self, lost)
        return there


@dataclass(frozen=True)
class Truncate(Fault):
    """Only a prefix arrives: in the buffer of a ``HIT``, or on the medium of a ``STORED`` object.

    Args:
        share: the share of the bytes that arrives, at least 0 and less than 1. At least one byte is missing.
    """

    share: float = 0.5
    operations: ClassVar[Collection[str]] = ("load_into", "store")

    def _cut(self, buffer: memoryview) -> int:
        return min(int(len(buffer) * self.share), max(len(buffer) - 1, 0))

    async def apply(self, call: Call, go_on: GoOn) -> list[Any]:
        """See :meth:`Fault.apply`."""
        if call.operation == "store":
            call.record(self, call.chosen)
            cut = [b[: self._cut(b)] if i in call.chosen else b for i, b in enumerate(call.buffers)]
            return await go_on(replace(call, buffers=cut))
        before = {index: bytes(call.buffers[index]) for index in call.chosen}
        outcomes = await go_on(call)
        hit = [index for index in call.chosen if outcomes[index] is LoadOutcome.HIT]
        for index in hit:
            cut_at = self._cut(call.buffers[index])
            call.buffers[index][cut_at:] = before[index][cut_at:]
        if hit:
            call.record(self, hit)
        return outcomes


@dataclass(frozen=True)
class FlipBit(Fault):
    """One bit is wrong: in the buffer of a ``HIT``, or on the medium of a ``STORED`` object."""

    operations: ClassVar[Collection[str]] = ("load_into", "store")

    async def apply(self, call: Call, go_on: GoOn) -> list[Any]:
        """See :meth:`Fault.apply`."""
        buffers = list(call.buffers)
        if call.operation == "store":
            for index in call.chosen:
                buffers[index] = memoryview(bytearray(buffers[index]))
        else:
            outcomes = await go_on(call)
        hit = [i for i in call.chosen if buffers[i] and (call.operation == "store" or outcomes[i] is LoadOutcome.HIT)]
        for index in hit:
            buffers[index][call.random.randrange(len(buffers[index]))] ^= 1 << call.random.randrange(8)
        if hit:
            call.record(self, hit)
        return await go_on(replace(call, buffers=buffers)) if call.operation == "store" else outcomes


@dataclass(frozen=True)
class Reorder(Fault):
    """The answers of a batch come in another order.

    Args:
        buffers: swap the buffers too, for ``load_into`` and ``store`` only. Each object is then loaded into, or stored
            from, the buffer of another object of the batch.
    """

    buffers: bool = False
    operations: ClassVar[Collection[str]] = ANSWERS
    per_object: ClassVar[bool] = False

    async def apply(self, call: Call, go_on: GoOn) -> list[Any]:
        """See :meth:`Fault.apply`."""
        if len(call.keys) < 2:
            return await go_on(call)
        shift = call.random.randrange(1, len(call.keys))
        order = [(index + shift) % len(call.keys) for index in range(len(call.keys))]
        call.record(self, call.chosen)
        if self.buffers and call.buffers:
            return await go_on(call.with_keys(order))
        answers = await go_on(call)
        return [answers[index] for index in order]
