"""Clauses about the event loop and about construction: C8 and C14."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from offload_core.testing.contract.checks import contract_test, expect
from offload_core.testing.rig.blocking_calls import blocking_calls
from offload_core.testing.rig.clients import Client, Rig, content

MIB = 1024 * 1024
LONG_SECONDS = 0.1
"""Shortest operation that shows whether the loop turns meanwhile."""
TRIES = 3


class LoopContract:
    """All tiers share the event loop, so no backend may block it."""

    largest_object_bytes = 64 * MIB
    """Largest object that is stored to see whether the loop turns meanwhile; lower it for a small medium."""

    @contract_test
    async def test_c08_nothing_that_blocks_is_called_on_the_event_loop(self, rig: Rig) -> None:
        client = rig.construct()
        key, other = rig.keys(2)
        objects = {key: content(5000), other: content(10)}
        steps: dict[str, Any] = {
            "open": client.open,
            "store": lambda: client.store(objects),
            "contains": lambda: client.contains([key, other]),
            "load_into": lambda: client.get(key, 5000),
            "load_into, which missed": lambda: client.get(rig.key(), 10),
            "list_objects": client.listed,
            "delete": lambda: client.delete([key]),
            "close": client.close,
        }
        if not client.backend.capabilities.lists:
            del steps["list_objects"]
        for name, step in steps.items():
            with blocking_calls() as recorded:
                await step()
            expect(
                not recorded,
                f"C8: {name} called {', '.join(recorded)} on the event loop's thread; await run_blocking",
            )

    @contract_test
    async def test_c08_the_event_loop_turns_while_a_large_object_is_stored_and_loaded(self, rig: Rig) -> None:
        client = await rig.client()
        size = MIB
        while size <= self.largest_object_bytes:
            measured = await _measure(rig, client, size)
            blocked = _blocking(measured)
            for _ in range(TRIES - 1):
                if blocked:
                    again = _blocking(await _measure(rig, client, size))
                    blocked = {name: times for name, times in again.items() if name in blocked}
            for name, (seconds, gap) in blocked.items():
                raise AssertionError(
                    f"C8: {name} of {size} bytes took {seconds:.3f} s, and the event loop stood still for {gap:.3f} s "
                    f"of them, more than half in each of {TRIES} tries; await run_blocking"
                )
            if not measured or min(measured.values())[0] >= LONG_SECONDS:
                return
            size *= 2

    @contract_test
    async def test_c14_construction_opens_nothing_and_starts_no_thread(self, rig: Rig) -> None:
        rig.construct()  # imports of the first use are not counted
        threads = set(threading.enumerate())
        with blocking_calls() as recorded:
            rig.construct()
        started = [thread.name for thread in threading.enumerate() if thread not in threads]
        expect(not recorded, f"C14: construction called {', '.join(recorded)}; do it in open()")
        expect(not started, f"C14: construction started the threads {started}; start them in open()")

    def test_c14_construction_needs_no_event_loop(self, rig: Rig) -> None:
        try:
            rig.construct()
        except Exception as error:
            pytest.fail(
                f"C14: construction outside of a running event loop raised {type(error).__name__}: {error}; "
                "create objects of the event loop in open()",
                pytrace=False,
            )


async def _longest_gap(operation: Coroutine[Any, Any, Any]) -> tuple[float, float]:
    """Return the seconds that ``operation`` took, and the longest time between two turns of the loop meanwhile."""
    gap = 0.0

    async def tick() -> None:
        nonlocal gap
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.001)
            now = time.monotonic()
            gap, last = max(gap, now - last), now

    ticking = asyncio.ensure_future(tick())
    await asyncio.sleep(0)
    begun = time.monotonic()
    try:
        await operation
        seconds = time.monotonic() - begun
        await asyncio.sleep(0.002)  # lets the tick come that the operation delayed
    finally:
        ticking.cancel()
    return seconds, gap


def _blocking(measured: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    return {
        name: (seconds, gap)
        for name, (seconds, gap) in measured.items()
        if seconds >= LONG_SECONDS and gap > seconds / 2
    }


async def _measure(rig: Rig, client: Client, size: int) -> dict[str, tuple[float, float]]:
    """Return seconds and longest gap of a store and a load of ``size`` bytes; nothing if the medium rejects them."""
    key = rig.key()
    async with client.storing([key], [size]) as reservation:
        if reservation.outcomes != (None,):
            return {}
        source = memoryview(bytearray(content(MIB) * (size // MIB)))
        stored = await _longest_gap(client.store_from([key], [source]))
    target = memoryview(bytearray(size))
    async with client.loading([key]):
        loaded = await _longest_gap(client.load_into([key], [target]))
    await client.delete([key])
    return {"store": stored, "load_into": loaded}
