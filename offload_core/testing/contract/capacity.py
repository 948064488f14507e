"""Clauses about reservations and limits: C9 to C11. All but one need the capability ``bounded``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from offload_core.api.backend import LoadOutcome, StoreOutcome, StoreReservation
from offload_core.api.keys import ObjectKey
from offload_core.testing.contract.checks import (
    contract_test,
    expect,
    expect_bytes,
    makes_thread_calls,
    need_thread_calls,
)
from offload_core.testing.rig.clients import Client, Rig, content, ended, held_or_done, turns

CAPACITY_BYTES = 1024 * 1024
"""The limit that ``bounded_options`` sets."""
OBJECT_BYTES = 64 * 1024
MAX_OBJECTS = CAPACITY_BYTES // OBJECT_BYTES
TURNS_BEFORE_CANCELLATION = 2
"""Turns of the event loop before a store is cancelled, if it makes no thread call to hold."""
_EVICTION_TRIES = 5
"""A medium may evict in the background, between two calls by chance. It does not do so in each try."""
_PATIENCE_SECONDS = 1.0
"""Time for a medium that evicts in the background."""
_LOOK_AGAIN_SECONDS = 0.02
MIN_OBJECTS = 4
"""Fewest objects that must fit. A medium's overhead per object may use some of the capacity, but not nearly all."""


class CapacityContract:
    """A limit holds at every moment, and released capacity can be used again."""

    @contract_test
    async def test_c05_what_is_already_present_is_not_evicted_by_its_own_batch(self, bounded_rig: Rig) -> None:
        client = await bounded_rig.client()
        for order in (1, -1):
            for _ in range(_EVICTION_TRIES):
                stored = await fill(bounded_rig, client)
                there = await client.present(stored)
                keys = [*there, *bounded_rig.keys(MAX_OBJECTS)][::order]
                async with client.storing(keys, [OBJECT_BYTES] * len(keys)) as reservation:
                    answers = zip(keys, reservation.outcomes, strict=True)
                    promised = [key for key, outcome in answers if outcome is StoreOutcome.ALREADY_PRESENT]
                    gone = (await client.contains(promised)).count(False)
                if not gone:
                    break
            expect(
                not gone,
                f"C5: prepare_store of {len(keys)} objects answered {len(promised)} times ALREADY_PRESENT, and "
                f"{gone} of these objects are gone: it evicted them for others of the same batch",
            )

    @contract_test
    async def test_c09_what_is_pinned_survives_eviction(self, bounded_rig: Rig) -> None:
        client = await bounded_rig.client()
        key, wanted = bounded_rig.key(), content(OBJECT_BYTES)
        await client.put({key: wanted})
        async with client.loading([key]):
            await fill(bounded_rig, client)
            await _expect_pinned(client, key, wanted, "while a reservation held it")

    @contract_test
    async def test_c09_what_is_pinned_twice_survives_until_both_are_released(self, bounded_rig: Rig) -> None:
        client = await bounded_rig.client()
        key, wanted = bounded_rig.key(), content(OBJECT_BYTES)
        await client.put({key: wanted})
        async with client.loading([key, key]):
            async with client.loading([key]):
                pass
            await fill(bounded_rig, client)
            await _expect_pinned(client, key, wanted, "while the first of two reservations held it")

    @contract_test
    async def test_c10_releasing_works_after_success_failure_and_cancellation(self, rig: Rig) -> None:
        client = await rig.client()
        for how, end in _ENDINGS.items():
            for store_by in client.ways_to_store:
                key = rig.key()
                store = await client.prepare_store([key], [OBJECT_BYTES])
                await end(client, store_by([key], [memoryview(bytearray(OBJECT_BYTES))]))
                await _release(store, f"a store that {how}")
            await client.put({key: bytes(OBJECT_BYTES)})
            load = await client.prepare_load([key])
            await end(client, client.load_into([key], [memoryview(bytearray(OBJECT_BYTES))]))
            await _release(load, f"a load that {how}")

    @contract_test
    async def test_c10_reservations_that_were_not_used_give_their_room_back(self, bounded_rig: Rig) -> None:
        await _expect_capacity_back(bounded_rig, "was never begun")

    @contract_test
    async def test_c10_stores_that_failed_give_their_room_back(self, bounded_rig: Rig) -> None:
        await need_thread_calls(bounded_rig)
        await _expect_capacity_back(bounded_rig, "failed")

    @contract_test
    async def test_c10_stores_that_were_cancelled_give_their_room_back(self, bounded_rig: Rig) -> None:
        await _expect_capacity_back(bounded_rig, "was cancelled")

    @contract_test
    async def test_c10_stored_objects_give_their_room_back_when_deleted(self, bounded_rig: Rig) -> None:
        await _expect_capacity_back(bounded_rig, "succeeded")

    @contract_test
    async def test_c10_what_was_pinned_makes_room_after_its_release(self, bounded_rig: Rig) -> None:
        client = await bounded_rig.client()
        keys = [*await fill(bounded_rig, client), bounded_rig.key()]
        if not await store_one(client, keys[-1]):
            return  # the medium does not evict, so pins change nothing
        there = await client.present(keys)
        for end in _ENDINGS.values():
            async with client.loading(there):
                await end(client, client.load_into(there, [memoryview(bytearray(OBJECT_BYTES)) for _ in there]))
        for load_by in client.ways_to_load[1:]:
            for end in (_succeed, _fail_first, _cancel, _cancel_after_turns):
                await end(client, load_by(there, [memoryview(bytearray(OBJECT_BYTES)) for _ in there]))
        expect(
            await store_with_patience(client, bounded_rig.key()),
            f"C10: {len(there)} objects were pinned and released 4 times in each way to load them, and the medium "
            "evicts none of them any more",
        )

    @contract_test
    async def test_c11_reservations_together_never_exceed_the_limit(self, bounded_rig: Rig) -> None:
        client = await bounded_rig.client()
        await fill(bounded_rig, client)
        held = await _reserve_all(bounded_rig, client)
        count = len(held)
        for reservation in held.values():
            await reservation.release()
        expect(
            count <= MAX_OBJECTS,
            f"C11: {count} reservations of {OBJECT_BYTES} bytes were granted at once under a limit of {CAPACITY_BYTES}",
        )

    @contract_test
    async def test_c11_one_batch_is_never_granted_more_than_the_limit(self, bounded_rig: Rig) -> None:
        client = await bounded_rig.client()
        keys = bounded_rig.keys(2 * MAX_OBJECTS)
        async with client.storing(keys, [OBJECT_BYTES] * len(keys)) as reservation:
            granted = reservation.outcomes.count(None)
        expect(
            granted <= MAX_OBJECTS,
            f"C11: one batch was granted {granted} objects of {OBJECT_BYTES} bytes under a limit of {CAPACITY_BYTES}",
        )
        async with client.storing(keys[:1], [2 * CAPACITY_BYTES]) as reservation:
            outcome = reservation.outcomes[0]
        expect(
            outcome is StoreOutcome.REJECTED,
            f"C11: an object of {2 * CAPACITY_BYTES} bytes under a limit of {CAPACITY_BYTES} was answered {outcome}, "
            "not REJECTED",
        )

    @contract_test
    async def test_c11_prepare_store_reports_the_objects_that_it_evicts(self, bounded_rig: Rig) -> None:
        client = await bounded_rig.client()
        if client.backend.capabilities.shared:  # the core keeps no index of it
            return
        stored = await fill(bounded_rig, client)
        before = await client.present(stored)
        keys = [*before[:2], *bounded_rig.keys(MIN_OBJECTS)]
        async with client.storing(keys, [OBJECT_BYTES] * len(keys)) as reservation:
            there = set(await client.present(stored))
        gone, reported = set(before) - there, set(reservation.evicted)
        expect(
            gone <= reported,
            f"C11: prepare_store of {len(keys)} objects evicted {len(gone)} others on a medium that is not shared, "
            f"and does not report {len(gone - reported)} of them as evicted",
        )
        expect(
            not reported & there,
            f"C11: prepare_store reports {len(reported & there)} objects as evicted that are still present",
        )

    @contract_test
    async def test_c11_clients_keep_one_limit_together(self, shared_bounded_rig: Rig) -> None:
        rig = shared_bounded_rig
        clients = [await rig.client(), await rig.client()]
        for client in clients:
            await fill(rig, client)
        held: dict[ObjectKey, tuple[Client, StoreReservation]] = {}
        for number, key in enumerate(rig.keys(4 * MAX_OBJECTS)):
            client = clients[number % 2]
            held[key] = client, await client.prepare_store([key], [OBJECT_BYTES])
        granted = [key for key, (_, reservation) in held.items() if reservation.outcomes == (None,)]
        for key in granted:
            await held[key][0].store_from([key], [memoryview(bytearray(OBJECT_BYTES))])
        for _, reservation in held.values():
            await reservation.release()
        expect(
            len(granted) <= MAX_OBJECTS,
            f"C11: two clients of one medium were granted {len(granted)} reservations of {OBJECT_BYTES} bytes at once "
            f"under a limit of {CAPACITY_BYTES}",
        )
        keys = rig.keys(4 * MAX_OBJECTS)
        for number, key in enumerate(keys):
            await store_one(clients[number // MAX_OBJECTS % 2], key)
        stored = [*granted, *keys]
        count = (await clients[0].contains(stored)).count(True)
        expect(
            count <= MAX_OBJECTS,
            f"C11: two clients of one medium store {count} objects of {OBJECT_BYTES} bytes under a limit of "
            f"{CAPACITY_BYTES}",
        )

    @contract_test
    async def test_c11_a_store_uses_the_room_of_its_own_reservation(self, bounded_rig: Rig) -> None:
        client = await bounded_rig.client()
        key, other = bounded_rig.keys(2)
        large, small, rest = 10 * OBJECT_BYTES, 2 * OBJECT_BYTES, 8 * OBJECT_BYTES
        async with client.storing([key], [large]) as first:
            async with client.storing([key], [small]) as second:
                if second.outcomes == (None,):
                    await client.store_from([key], [memoryview(bytearray(small))])
            async with client.storing([other], [rest]) as third:
                expect(
                    first.outcomes != (None,) or third.outcomes == (StoreOutcome.REJECTED,),
                    f"C11: {large} bytes were reserved and not used, {small} bytes were stored under another one of "
                    f"the key's reservations, and then {rest} bytes were granted under a limit of {CAPACITY_BYTES}",
                )

    @contract_test
    async def test_c11_a_store_without_a_reservation_keeps_the_limit(self, bounded_rig: Rig) -> None:
        client = await bounded_rig.client()
        reserving, new = bounded_rig.keys(MAX_OBJECTS), bounded_rig.keys(MAX_OBJECTS + 1)
        async with client.storing(reserving, [OBJECT_BYTES] * MAX_OBJECTS) as reservation:
            reserved = reservation.outcomes.count(None)
            await _expect_limit_without_reservation(client, new[reserved:], reserved)
        await _expect_limit_without_reservation(client, new, 0)

    @contract_test
    async def test_c11_what_was_granted_can_be_stored(self, bounded_rig: Rig) -> None:
        client = await bounded_rig.client()
        keys = bounded_rig.keys(MAX_OBJECTS)
        held = {key: await client.prepare_store([key], [OBJECT_BYTES]) for key in keys}
        granted = [key for key, reservation in held.items() if reservation.outcomes == (None,)]
        for number, key in enumerate(granted, 1):
            (outcome,) = await client.store_from([key], [memoryview(bytearray(OBJECT_BYTES))])
            expect(
                outcome is StoreOutcome.STORED,
                f"C11: capacity for {len(granted)} objects was granted, but storing number {number} was {outcome.name}",
            )
        for reservation in held.values():
            await reservation.release()


async def _expect_limit_without_reservation(client: Client, keys: list[ObjectKey], reserved: int) -> None:
    await client.store_from(keys, [memoryview(bytearray(OBJECT_BYTES)) for _ in keys])
    stored = (await client.contains(keys)).count(True)
    expect(
        (reserved or stored) and stored + reserved <= MAX_OBJECTS,
        f"C11: with {reserved} objects of {OBJECT_BYTES} bytes reserved, {stored} were stored without a reservation "
        f"under a limit of {CAPACITY_BYTES}",
    )


async def _unused(client: Client, operation: Any) -> None:
    operation.close()


async def _succeed(client: Client, operation: Any) -> None:
    await operation


async def _fail(client: Client, operation: Any) -> None:
    client.calls.script(fail=range(1, 100))
    await ended(await held_or_done(client, operation))
    client.calls.open()


async def _fail_first(client: Client, operation: Any) -> None:
    """Fail one call only: if the call that releases fails too, its pins may be lost."""
    client.calls.script(fail={1})
    await ended(await held_or_done(client, operation))
    client.calls.open()


async def _cancel(client: Client, operation: Any) -> None:
    client.calls.script(hold={1})
    task = await held_or_done(client, operation)
    task.cancel()
    client.calls.open()
    await ended(task)


async def _cancel_after_turns(client: Client, operation: Any) -> None:
    task = asyncio.ensure_future(operation)
    await turns(TURNS_BEFORE_CANCELLATION)
    task.cancel()
    await ended(task)


_ENDINGS: dict[str, Callable[[Client, Any], Awaitable[None]]] = {
    "was never begun": _unused,
    "succeeded": _succeed,
    "failed": _fail,
    "was cancelled": _cancel,
}


async def _release(reservation: Any, name: str) -> None:
    try:
        await reservation.release()
    except Exception as error:
        raise AssertionError(f"C10: releasing {name} raised {type(error).__name__}: {error}") from error


async def _expect_capacity_back(rig: Rig, how: str) -> None:
    end = _ENDINGS[how]
    if end is _cancel and not await makes_thread_calls(rig):
        end = _cancel_after_turns
    client = await rig.client()
    before = await fitting_objects(rig, client)
    expect(
        before >= MIN_OBJECTS,
        f"C11: under a limit of {CAPACITY_BYTES} bytes only {before} objects of {OBJECT_BYTES} bytes fit",
    )
    rounds = 2 * MAX_OBJECTS
    for number in range(rounds):
        keys = rig.keys(2)
        store_by = client.ways_to_store[number % len(client.ways_to_store)]
        async with client.storing(keys, [OBJECT_BYTES] * 2) as reservation:
            granted = [key for key, outcome in zip(keys, reservation.outcomes, strict=True) if outcome is None]
            sources = [memoryview(bytearray(OBJECT_BYTES)) for _ in granted]
            await end(client, store_by(granted, sources))
        await rig.settle()
        await _delete_all(client, keys)
    after = await fitting_objects(rig, client)
    expect(
        after == before,
        f"C10: {rounds} reservations for stores, each of which {how}, were released and their objects deleted; "
        f"{after} objects fit where {before} fitted before",
    )


async def fitting_objects(rig: Rig, client: Client) -> int:
    """Return the number of objects that fit at once; they are stored and deleted again."""
    held = await _reserve_all(rig, client)
    for key, reservation in held.items():
        await client.store_from([key], [memoryview(bytearray(OBJECT_BYTES))])
        await reservation.release()
    await _delete_all(client, list(held))
    return len(held)


async def _reserve_all(rig: Rig, client: Client) -> dict[ObjectKey, StoreReservation]:
    """Hold one reservation after the other until one is refused."""
    held: dict[ObjectKey, StoreReservation] = {}
    for key in rig.keys(2 * MAX_OBJECTS):
        reservation = await client.prepare_store([key], [OBJECT_BYTES])
        if reservation.outcomes != (None,):
            await reservation.release()
            break
        held[key] = reservation
    return held


async def _delete_all(client: Client, keys: list[ObjectKey]) -> None:
    await client.delete(await client.present(keys))


async def store_one(client: Client, key: ObjectKey) -> bool:
    """Store one object; return whether it is stored."""
    return await client.store({key: bytes(OBJECT_BYTES)}) == [StoreOutcome.STORED]


async def store_with_patience(client: Client, key: ObjectKey) -> bool:
    """Store an object; if it is rejected, try again for a while. Return whether it is stored."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not await store_one(client, key):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(_LOOK_AGAIN_SECONDS)
    return True


async def fill(rig: Rig, client: Client) -> list[ObjectKey]:
    """Store three times the capacity, some objects one by one and some at once."""
    keys = rig.keys(3 * MAX_OBJECTS)
    for key in keys[:-MAX_OBJECTS]:
        await client.store({key: bytes(OBJECT_BYTES)})
    await asyncio.gather(*(client.store({key: bytes(OBJECT_BYTES)}) for key in keys[-MAX_OBJECTS:]))
    return keys


async def _expect_pinned(client: Client, key: ObjectKey, wanted: bytes, when: str) -> None:
    target = bytearray(len(wanted))
    (outcome,) = await client.load_into([key], [memoryview(target)])
    expect(
        outcome is LoadOutcome.HIT,
        f"C9: a pinned object of {len(wanted)} bytes was gone ({outcome.name}) {when} and "
        f"{3 * MAX_OBJECTS} others of its size were stored under a limit of {CAPACITY_BYTES}",
    )
    expect_bytes("C9", f"a pinned object, {when},", target, wanted)
