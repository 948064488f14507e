"""Clauses about the event loop and about construction: C8 and C14."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from offload_core.api.keys import ObjectKey
from offload_core.testing.contract.checks import contract_test, expect
from offload_core.testing.rig.blocking_calls import blocking_calls
from offload_core.testing.rig.clients import Client, Rig, content
from offload_core.testing.rig.longest_callback import longest_callback
from offload_core.testing.rig.recording_check import RecordingCheck
from offload_core.testing.rig.recording_seal import RecordingSeal

MIB = 1024 * 1024
LONG_SECONDS = 0.1
"""Shortest operation that shows whether the loop turns meanwhile."""
TRIES = 6
"""On a busy machine a thread of the loop may get no processor for longer than a few tries last."""
COMPUTED_BYTES = 16 * MIB
"""Size of the object that shows work on its bytes in the event loop's thread."""
MOST_PROCESSOR_SECONDS = 0.006
"""Longest callback of the event loop, in processor time. A processor hashes less than 16 MiB meanwhile."""

MOST_SECONDS_FOR_KEYS = 0.05
"""Longest callback of a call with many keys, in processor time: some 45 microseconds for each of 1,100 keys."""


class LoopContract:
    """All tiers share the event loop, so no backend may block it."""

    largest_object_bytes = 64 * MIB
    """Largest object that is stored to see whether the loop turns meanwhile; lower it for a small medium."""

    if TYPE_CHECKING:  # the clauses about names have it
        many_objects: int

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
            "load_and_check": lambda: _load_in_one_call(client, key, 5000),
            "store_and_seal": lambda: _store_and_seal(client, rig.key(), 5000),
            "touch": lambda: client.touch([key, other], [False, True]),
            "list_objects": client.listed,
            "delete": lambda: client.delete([key]),
            "close": client.close,
        }
        backend = client.backend
        optional: dict[str, Callable[[], bool]] = {
            "load_and_check": lambda: backend.loads_in_one_call,
            "store_and_seal": lambda: backend.seals_stores,  # known once it is open
            "touch": lambda: backend.capabilities.spares,
            "list_objects": lambda: backend.capabilities.lists,
        }
        for name, step in steps.items():
            if name in optional and not optional[name]():
                continue
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
    async def test_c08_nothing_is_computed_on_the_event_loop(self, rig: Rig) -> None:
        client = await rig.client()
        size = min(COMPUTED_BYTES, self.largest_object_bytes)
        computing = await _computing(rig, client, size, self.many_objects)
        for _ in range(TRIES - 1):
            if computing:
                again = await _computing(rig, client, size, self.many_objects)
                computing = {name: seconds for name, seconds in again.items() if name in computing}
        for name, (seconds, most_seconds) in computing.items():
            raise AssertionError(
                f"C8: {name} computed for {seconds * 1000:.1f} ms on the event loop's thread without a pause, "
                f"and for more than {most_seconds * 1000:g} ms in each of {TRIES} tries; await run_blocking"
            )

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


async def _longest_gap(
    operation: Coroutine[Any, Any, Any], lookup: Callable[[], Awaitable[Any]]
) -> tuple[float, float]:
    """Return the seconds that ``operation`` took, and the longest time between two turns of the loop meanwhile.

    Args:
        lookup: called again and again meanwhile; it shows a lock that the operation holds.
    """
    gap = 0.0

    async def tick() -> None:
        nonlocal gap
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.001)
            now = time.monotonic()
            gap, last = max(gap, now - last), now

    async def look() -> None:
        while True:
            await lookup()
            await asyncio.sleep(0.001)

    ticking = asyncio.gather(tick(), look())
    await asyncio.sleep(0)
    begun = time.monotonic()
    try:
        await operation
        seconds = time.monotonic() - begun
        await asyncio.sleep(0.002)  # lets the tick come that the operation delayed
    finally:
        ticking.cancel()
        await asyncio.wait({ticking})
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

    async def lookup() -> None:
        with suppress(OSError):  # other tests check whether it may fail
            await client.contains([key])

    async with client.storing([key], [size]) as reservation:
        if reservation.outcomes != (None,):
            return {}
        source = memoryview(bytearray(content(MIB) * (size // MIB)))
        stored = await _longest_gap(client.store_from([key], [source]), lookup)
    target = memoryview(bytearray(size))
    async with client.loading([key]):
        loaded = await _longest_gap(client.load_into([key], [target]), lookup)
    await client.delete([key])
    return {"store": stored, "load_into": loaded}


async def _computing(rig: Rig, client: Client, size: int, count: int) -> dict[str, tuple[float, float]]:
    """Return the operations that computed for too long, with their seconds and the most that they may take.

    Args:
        size: the size of an object in bytes.
        count: the number of keys, nearly all of them absent.
    """
    key, keys = rig.key(), rig.keys(count)
    found: dict[str, tuple[float, float]] = {}

    async def measured(
        name: str, operation: Coroutine[Any, Any, Any], most_seconds: float = MOST_PROCESSOR_SECONDS
    ) -> None:
        with longest_callback() as longest:
            await asyncio.ensure_future(operation)
        if longest.seconds > most_seconds:
            found[name] = longest.seconds, most_seconds

    async def prepare_load() -> None:
        async with client.loading(keys):
            pass

    await measured(f"contains of {count} keys", client.contains(keys), MOST_SECONDS_FOR_KEYS)
    await measured(f"prepare_load of {count} keys", prepare_load(), MOST_SECONDS_FOR_KEYS)
    if client.backend.capabilities.spares:
        await measured(f"touch of {count} keys", client.touch(keys, [False] * count), MOST_SECONDS_FOR_KEYS)
    source, target = memoryview(bytearray(content(MIB) * (size // MIB + 1))[:size]), memoryview(bytearray(size))
    async with client.storing([key], [size]) as reservation:
        if reservation.outcomes != (None,):
            return found
        await measured(f"store of {size} bytes", client.store_from([key], [source]))
    await measured(f"contains of an object of {size} bytes", client.contains([key]))
    async with client.loading([key]):
        await measured(f"load_into of {size} bytes", client.load_into([key], [target]))
    await measured(f"delete of {size} bytes", client.delete([key]))
    return found


async def _load_in_one_call(client: Client, key: ObjectKey, size: int) -> None:
    buffer = memoryview(bytearray(size))
    await client.load_and_check([key], [buffer], [RecordingCheck(buffer)])


async def _store_and_seal(client: Client, key: ObjectKey, size: int) -> None:
    buffer = memoryview(bytearray(size))
    async with client.storing([key], [size]):
        await client.store_and_seal([key], [buffer], [RecordingSeal(buffer)])
