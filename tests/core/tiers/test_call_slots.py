"""Slots that hang: others get them, up to a bound, and they come back."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable

from offload_core.tiers.calls.call_slots import CallSlots


class Calls:
    """Calls that end when they are told to. ``began`` has the names of those that have got a slot."""

    def __init__(self, slots: CallSlots) -> None:
        self._slots = slots
        self._begun: dict[str, asyncio.Event] = {}
        self._gates: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.began: list[str] = []

    def start(self, name: str, deadline: float = math.inf) -> None:
        self._begun[name], self._gates[name] = asyncio.Event(), asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._call(name, deadline))

    async def has_begun(self, name: str) -> None:
        await self._begun[name].wait()

    async def end(self, name: str) -> None:
        self._gates[name].set()
        await self._tasks[name]

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.wait([self._tasks[name]])

    async def _call(self, name: str, deadline: float) -> None:
        async with self._slots.held(deadline):
            self.began.append(name)
            self._begun[name].set()
            await self._gates[name].wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(scene: Callable[[Calls], Awaitable[None]], slots: int = 1, spare_slots: int = 1) -> None:
    async def main() -> None:
        calls = Calls(CallSlots(slots, spare_slots))
        await asyncio.wait_for(scene(calls), 30)

    asyncio.run(main())


def late() -> float:
    return time.monotonic()


def test_a_call_waits_for_a_slot_while_others_are_in_time() -> None:
    async def scene(calls: Calls) -> None:
        calls.start("first")
        calls.start("second")
        await settle()
        assert calls.began == ["first"]
        await calls.end("first")
        await settle()
        assert calls.began == ["first", "second"]
        await calls.end("second")

    run(scene)


def test_the_slot_of_a_late_call_is_given_to_another_and_not_twice() -> None:
    async def scene(calls: Calls) -> None:
        calls.start("hung", late())
        await settle()
        calls.start("second")
        calls.start("third")
        await calls.has_begun("second")
        await calls.end("hung")
        await settle()
        assert calls.began == ["hung", "second"], "one slot, which the second has"
        await calls.end("second")
        await calls.end("third")

    run(scene)


def test_further_late_calls_keep_their_slots_until_one_of_the_others_comes_back() -> None:
    async def scene(calls: Calls) -> None:
        for name in ("one", "two"):
            calls.start(name, late())
        await calls.has_begun("two")  # in the slot of the first
        calls.start("three")
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert calls.began == ["one", "two"], "a spare slot is lent once"
        await calls.end("one")
        await settle()
        assert calls.began == ["one", "two", "three"]
        await calls.end("two")
        await calls.end("three")

    run(scene)


def test_all_slots_are_back_after_calls_that_hung_were_cancelled_or_waited_in_vain() -> None:
    async def scene(calls: Calls) -> None:
        for name in ("hung", "cancelled", "waiting"):
            calls.start(name, late())
        await asyncio.sleep(0.01)
        await calls.cancel("cancelled")
        await calls.cancel("waiting")
        await calls.end("hung")
        calls.began.clear()
        for name in ("a", "b", "c"):
            calls.start(name)
        await settle()
        assert calls.began == ["a", "b"]
        for name in ("a", "b", "c"):
            await calls.end(name)

    run(scene, slots=2)


def test_free_slots_are_those_that_a_call_gets_at_once() -> None:
    async def main() -> None:
        slots = CallSlots(3, spare_slots=1)
        calls = Calls(slots)
        free = [slots.free]
        for name, deadline in (("late", late()), ("first", math.inf), ("second", math.inf), ("third", math.inf)):
            calls.start(name, deadline)
            await calls.has_begun(name)
            if name == "late":
                await asyncio.sleep(0.01)  # its deadline has passed, and the timer gives its slot to others
            free.append(slots.free)
        assert free == [3, 3, 2, 1, 0]
        for name in ("first", "late", "second", "third"):
            await calls.end(name)
            free.append(slots.free)
        assert free[5:] == [1, 1, 2, 3], "the late call has given its slot up already"

    asyncio.run(asyncio.wait_for(main(), 30))
