"""A backend that misbehaves on purpose: a wrapper that injects a plan's faults into any backend.

A :class:`~offload_core.testing.faults.plan.FaultPlan` picks the calls for each fault. Its choices depend on the seed,
on the keys and on the number of earlier calls with the same keys. They never depend on time or on calls with other
keys, so a run can be repeated::

    plan = FaultPlan([Inject(FlipBit(), "load_into", chance=0.1), Inject(Fail(errno.EIO), "store", calls={3})], seed=7)
    backend = FaultyBackend(DiskBackend(options, context), plan)
    ...
    assert plan.injected  # the faults that really happened, in order

Each entry of the plan counts its calls from 1. The first entry is the outermost: a ``Slow`` before a ``Fail`` fails
late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from offload_core.api.backend import Backend, LoadOutcome, LoadReservation, StoreOutcome, StoreReservation
from offload_core.api.cancellation import to_the_end
from offload_core.api.keys import ObjectKey
from offload_core.api.wrapper import BackendWrapper
from offload_core.testing.faults.plan import Call, Fault, FaultPlan, GoOn


class FaultyBackend(BackendWrapper):
    """Pass calls on to ``inner`` with the faults of ``plan``.

    Closing releases hanging calls, waits for all running calls (C13) and closes the inner backend.
    """

    def __init__(self, inner: Backend[Any], plan: FaultPlan) -> None:
        super().__init__(inner)
        self.plan = plan
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def open(self) -> None:
        """See :meth:`Backend.open`."""

        async def operate(call: Call) -> list[Any]:
            await self.inner.open()
            return []

        await self._call("open", operate)

    async def close(self) -> None:
        """See :meth:`Backend.close`. Cancellation while calls run leaves the inner backend open."""
        self.plan.release()
        await self._idle.wait()
        await self.inner.close()

    async def contains(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        """See :meth:`Backend.contains`."""

        async def operate(call: Call) -> list[Any]:
            return list(await self.inner.contains(call.keys))

        return await self._call("contains", operate, keys)

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        """See :meth:`Backend.load_into`."""

        async def operate(call: Call) -> list[Any]:
            return list(await self.inner.load_into(call.keys, call.buffers))

        return await self._call("load_into", operate, keys, buffers)

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        """See :meth:`Backend.store`."""

        async def operate(call: Call) -> list[Any]:
            return list(await self.inner.store(call.keys, call.buffers))

        return await self._call("store", operate, keys, buffers)

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        """See :meth:`Backend.delete`."""

        async def operate(call: Call) -> list[Any]:
            await self.inner.delete(call.keys)
            return []

        await self._call("delete", operate, keys)

    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        """See :meth:`Backend.prepare_load`. If a fault raises, the pins of the inner backend are released."""
        held: list[LoadReservation] = []

        async def operate(call: Call) -> list[Any]:
            held.append(await self.inner.prepare_load(call.keys))
            return list(held[-1].present)

        present = await self._prepare("prepare_load", operate, held, keys)
        return _FaultyLoadReservation(present, held)

    async def prepare_store(
        self, keys: Sequence[ObjectKey], nbytes: Sequence[int], spare: Sequence[bool] = ()
    ) -> StoreReservation:
        """See :meth:`Backend.prepare_store`. If a fault raises, the inner backend's reservation is released."""
        held: list[StoreReservation] = []
        flags = [spare] if spare else []  # without flags, the inner backend is called without them too

        async def operate(call: Call) -> list[Any]:
            held.append(await self.inner.prepare_store(call.keys, nbytes, *flags))
            return list(held[-1].outcomes)

        outcomes = await self._prepare("prepare_store", operate, held, keys)
        return _FaultyStoreReservation(outcomes, held)

    async def _prepare(
        self,
        operation: str,
        operate: GoOn,
        held: Sequence[LoadReservation | StoreReservation],
        keys: Sequence[ObjectKey],
    ) -> list[Any]:
        try:
            return await self._call(operation, operate, keys)
        except BaseException:
            for reservation in held:
                await to_the_end(reservation.release())
            raise

    async def _call(
        self, operation: str, operate: GoOn, keys: Sequence[ObjectKey] = (), buffers: Sequence[memoryview] = ()
    ) -> list[Any]:
        """Send a call through the faults that the plan has chosen for it, the first one outermost."""
        call = Call(operation, keys, buffers, self.inner, self.plan, range(len(keys)))
        self._running += 1
        self._idle.clear()
        try:
            for fault, seen_by_fault in reversed(self.plan.choose(call)):
                operate = _around(fault, seen_by_fault, operate)
            return await operate(call)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()


def _around(fault: Fault, seen_by_fault: Call, inner: GoOn) -> GoOn:
    """Return ``inner`` with ``fault`` around it; outer faults may have taken keys out of the batch or moved them."""

    async def operate(call: Call) -> list[Any]:
        chosen = [index for index, position in enumerate(call.positions) if position in seen_by_fault.chosen]
        return await fault.apply(replace(call, chosen=chosen, random=seen_by_fault.random), inner)

    return operate


class _FaultyLoadReservation(LoadReservation):
    def __init__(self, present: Sequence[bool], held: Sequence[LoadReservation]) -> None:
        super().__init__(present, nbytes=held[-1].nbytes if held else None)
        self._held = held

    async def release(self) -> None:
        for reservation in self._held:
            await reservation.release()


class _FaultyStoreReservation(StoreReservation):
    def __init__(self, outcomes: Sequence[StoreOutcome | None], held: Sequence[StoreReservation]) -> None:
        super().__init__(outcomes, [key for reservation in held for key in reservation.evicted])
        self._held = held

    async def release(self) -> None:
        for reservation in self._held:
            await reservation.release()
