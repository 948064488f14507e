"""Clauses about the visibility of stored objects to clients: C5, C6 and C18."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from offload_core.api.backend import LoadOutcome
from offload_core.api.keys import ObjectKey
from offload_core.testing.contract.checks import (
    contract_test,
    expect,
    expect_bytes,
    expect_results,
    threads_that_alternate,
)
from offload_core.testing.rig.clients import Client, Rig, content, ended, held_or_done, turns, until

HIT, MISS = LoadOutcome.HIT, LoadOutcome.MISS
MAX_HELD_CALLS = 6
"""A store's thread calls before this one are held, one by one."""
MAX_TURNS = 8
"""For backends without threads, stores are looked at and cancelled after fewer turns of the event loop than this."""
SMALL_BYTES = 128 * 1024
LARGE_BYTES = 6 * 1024 * 1024 + 1
"""Size of a large object; clients and servers divide objects over 4 or 5 MiB into parts."""
DAY_SECONDS = 86_400


class VisibilityContract:
    """Stored objects are visible, whole, to every client that should see them."""

    watch_seconds = 2.0
    """Time after which a stored object must still be there."""

    if TYPE_CHECKING:  # the clauses about the event loop have it
        largest_object_bytes: int

    @contract_test
    async def test_c05_what_is_stored_is_visible_at_once(self, rig: Rig) -> None:
        client = await rig.client()
        key, wanted = rig.key(), content(2000)
        async with client.storing([key], [2000]):
            await client.store_from([key], [memoryview(bytearray(wanted))])
            await _expect_visible(client, key, wanted, "right after store returned, its reservation still held")
        await _expect_visible(client, key, wanted, "after the reservation was released")

    @contract_test
    async def test_c05_what_is_stored_is_there_after_reopening(self, persistent_rig: Rig) -> None:
        key, wanted = persistent_rig.key(), content(2000)
        for number in range(2):
            client = await persistent_rig.client()
            if number == 0:
                await client.put({key: wanted})
            await client.close()
        await _expect_visible(await persistent_rig.client(), key, wanted, "after closing and opening the medium")

    @contract_test
    async def test_c05_what_is_stored_is_visible_to_a_second_client(self, shared_rig: Rig) -> None:
        writer, reader = await shared_rig.client(), await shared_rig.client()
        for seed in range(2):
            key, wanted = shared_rig.key(), content(2000, seed)
            expect_results("C5", "contains", await reader.contains([key]), [False])
            await writer.put({key: wanted})
            await _expect_visible(reader, key, wanted, "from a second client")
            writer, reader = reader, writer

    @contract_test
    async def test_c05_what_is_stored_does_not_vanish_by_itself(self, lasting_rig: Rig) -> None:
        client = await lasting_rig.client()
        objects = {key: content(1000, seed) for seed, key in enumerate(lasting_rig.keys(2))}
        loaded, alone = objects
        await client.put(objects)
        await client.get(loaded, 1000)
        await asyncio.sleep(self.watch_seconds)
        for key, name in ((alone, "stored"), (loaded, "stored and loaded")):
            await _expect_visible(client, key, objects[key], f"{self.watch_seconds:g} s after it was {name}")

    @contract_test
    async def test_c06_readers_see_whole_objects_while_others_write(self, rig: Rig) -> None:
        await _expect_whole_under_writers(rig, SMALL_BYTES, rounds=12)

    @contract_test
    async def test_c06_readers_see_large_objects_whole_while_others_write(self, rig: Rig) -> None:
        await _expect_whole_under_writers(rig, min(LARGE_BYTES, self.largest_object_bytes), rounds=3)

    @contract_test
    async def test_c06_between_the_steps_of_a_store_others_see_all_or_nothing(self, shared_rig: Rig) -> None:
        writer, reader = await shared_rig.client(), await shared_rig.client()
        wanted = content(10_000)
        for store_by in writer.ways_to_store:
            key = shared_rig.key()
            async with writer.storing([key], [10_000]):
                writer.calls.script(hold=None)
                store = await held_or_done(writer, store_by([key], [memoryview(bytearray(wanted))]))
                for number in range(1, MAX_HELD_CALLS):
                    if store.done():
                        break
                    await _expect_whole_or_absent(reader, key, wanted, f"before thread call {number} of its store")
                    writer.calls.let_pass(number)
                    await until(partial(_next_call_or_end, writer, store, number))
                writer.calls.open()
                await store
            await _expect_whole_or_absent(reader, key, wanted, "after its store")
            for count in range(1, MAX_TURNS):
                key = shared_rig.key()
                async with writer.storing([key], [10_000]):
                    writer.calls.script()
                    store = asyncio.ensure_future(store_by([key], [memoryview(bytearray(wanted))]))
                    await turns(count)
                    await _expect_whole_or_absent(
                        reader, key, wanted, f"{count} turns of the event loop after its store began"
                    )
                    await store

    @contract_test
    async def test_c06_a_store_that_fails_or_is_cancelled_leaves_all_or_nothing(self, rig: Rig) -> None:
        client = await rig.client()
        for store_by in client.ways_to_store:
            await _expect_all_or_nothing(rig, client, store_by)

    @contract_test
    async def test_c18_a_listing_names_what_is_there_once_with_its_size(self, listing_rig: Rig) -> None:
        client = await listing_rig.client()
        expect_results("C18", "list_objects, on a fresh medium,", await client.listed(), [])
        objects = {key: content(100 + 7 * seed) for seed, key in enumerate(listing_rig.keys(20))}
        objects[next(iter(objects))._replace(pack="state-u16")] = content(5)
        objects[next(iter(objects))._replace(namespace="cd" * 32)] = content(6)
        await client.put(objects)
        await client.delete(list(objects)[:3])
        there = await client.present(list(objects))
        listed = await client.listed()
        counts = Counter(found.key for found in listed)
        for key in [*there, *counts]:
            expect(
                counts[key] == (key in there),
                f"C18: list_objects listed {key} {counts[key]} times; contains says {key in there}",
            )
        for found in listed:
            size = len(objects[found.key])
            expect(found.nbytes == size, f"C18: list_objects gave {found.key} {found.nbytes} bytes; it has {size}")

    @contract_test
    async def test_c18_a_listing_follows_stores_and_deletes(self, listing_rig: Rig) -> None:
        client = await listing_rig.client()
        first = listing_rig.key()  # the others differ in the last byte: a medium with folders may keep them in one
        second, third = (first._replace(chunk_hash=first.chunk_hash[:-1] + bytes([n])) for n in (1, 2))
        await client.put({first: content(10), second: content(20)})
        await client.listed()
        await client.delete([first])
        await client.put({third: content(30)})
        keys = [first, second, third]
        there = set(await client.present(keys))
        listed = {found.key for found in await client.listed()}
        for key in keys:
            expect(
                (key in listed) == (key in there),
                f"C18: after an earlier listing, a delete and a store, list_objects "
                f"{'lists' if key in listed else 'does not list'} {key}; contains says {key in there}",
            )

    @contract_test
    async def test_c18_a_listing_says_when_objects_were_stored(self, listing_rig: Rig) -> None:
        client = await listing_rig.client()
        await client.put({listing_rig.key(): content(10)})
        for found in await client.listed():
            expect(
                abs(found.stored_at_seconds - time.time()) < DAY_SECONDS,
                f"C18: list_objects says that an object was stored at {found.stored_at_seconds}; "
                f"it is {time.time():.0f} seconds since the epoch",
            )

    @contract_test
    async def test_c18_a_listing_may_be_left_at_any_batch(self, listing_rig: Rig) -> None:
        client = await listing_rig.client()
        await client.put({key: content(10) for key in listing_rig.keys(3)})
        for _ in range(3):
            async for _batch in client.backend.list_objects():
                break
            await listing_rig.settle()
            count = len({found.key for found in await client.listed()})
            expect(count == 3, f"C18: after a listing that was left, list_objects lists {count} of 3 objects")

    @contract_test
    async def test_c18_a_listing_goes_on_when_objects_are_deleted(self, listing_rig: Rig) -> None:
        client = await listing_rig.client()
        keys = listing_rig.keys(40)
        await client.put({key: content(10) for key in keys})
        counts: Counter[ObjectKey] = Counter()
        kept: list[ObjectKey] = []
        async for batch in client.backend.list_objects():
            counts.update(found.key for found in batch)
            if not kept:
                await client.delete(keys[::2])
                kept = keys[1::2]
        there = await client.present(kept)
        wrong = [key for key in there if counts[key] != 1]
        expect(
            not wrong,
            f"C18: {len(keys) - len(kept)} objects were deleted during a listing; of {len(there)} others, it did not "
            f"list {len(wrong)} exactly once",
        )

    @contract_test
    async def test_c18_a_listing_names_no_unfinished_object(self, listing_rig: Rig) -> None:
        rig, client = listing_rig, await listing_rig.client()
        for number in range(1, MAX_HELD_CALLS):
            key = rig.key()
            async with client.storing([key], [10_000]):
                await _expect_listed_if_whole(client, key, "whose room is reserved")
                client.calls.script(fail={number})
                store = await held_or_done(client, client.store_from([key], [memoryview(bytearray(10_000))]))
                reached = client.calls.count >= number
                client.calls.open()
                await ended(store)
                await rig.settle()
            await _expect_listed_if_whole(client, key, f"whose store failed at thread call {number}")
            if not reached:
                break
        reader = await rig.client() if client.backend.capabilities.shared else client
        large = min(LARGE_BYTES, self.largest_object_bytes)
        source = memoryview(bytearray(large))
        for _ in range(3):
            key = rig.key()
            async with client.storing([key], [large]):
                store = asyncio.ensure_future(client.store_from([key], [source]))
                while not store.done():
                    await _expect_listed_if_whole(reader, key, "that is being stored", large)
                    await asyncio.sleep(0)
                await store
            await client.delete([key])

    @contract_test
    async def test_c18_a_backend_that_cannot_list_says_so(self, not_listing_rig: Rig) -> None:
        client = await not_listing_rig.client()
        try:
            listed = await client.listed()
        except NotImplementedError:
            return
        raise AssertionError(
            f"C18: capability lists is not declared, but list_objects yielded {listed}; "
            "declare it, or let it raise NotImplementedError"
        )


async def _expect_visible(client: Client, key: ObjectKey, wanted: bytes, when: str) -> None:
    expect_results("C5", f"contains ({when})", await client.contains([key]), [True])
    async with client.loading([key]) as reservation:
        expect_results("C5", f"prepare_load ({when})", [bool(there) for there in reservation.present], [True])
        target = bytearray(len(wanted))
        expect_results("C5", f"load_into ({when})", await client.load_into([key], [memoryview(target)]), [HIT])
    expect_bytes("C5", f"an object {when}", target, wanted)


async def _expect_whole_under_writers(rig: Rig, size: int, rounds: int) -> None:
    """Load an object again and again while clients store it with other bytes, and delete it in the first part."""
    writers = [await rig.client()]
    shared = writers[0].backend.capabilities.shared
    if shared:
        writers.append(await rig.client())
    writers *= 2
    reader = await rig.client() if shared else writers[0]
    key = rig.key()
    torn: list[str] = []

    async def write(client: Client, letter: bytes) -> None:
        for _ in range(rounds):
            with suppress(OSError):  # other tests check whether it may fail
                await client.store({key: letter * size})
                await client.delete([key])

    async def replace() -> None:
        """Store other bytes again and again; all reservations are made while the object is absent."""
        async with AsyncExitStack() as held:
            reservations = [await held.enter_async_context(client.storing([key], [size])) for client in writers]
            for index, (client, reservation) in enumerate(zip(writers, reservations, strict=True)):
                if reservation.outcomes == (None,):
                    with suppress(OSError):
                        store_by = client.ways_to_store[index % len(client.ways_to_store)]
                        await store_by([key], [memoryview(bytearray(b"%d" % index * size))])

    async def read(until: asyncio.Future[Any], way: int) -> None:
        load_by = reader.ways_to_load[way]
        while not until.done() and not torn:
            await asyncio.sleep(0)  # the backend may never wait
            got = bytearray([0xA5]) * size
            (outcome,) = await load_by([key], [memoryview(got)])
            if outcome is not MISS and (outcome is not HIT or got.count(got[0]) != size):
                seen = Counter(got)
                torn.append(f"{outcome.name} with {', '.join(f'{n} bytes {chr(b)!r}' for b, n in seen.items())}")

    with threads_that_alternate():
        writing = asyncio.gather(*(write(client, b"%d" % index) for index, client in enumerate(writers)))
        await asyncio.gather(read(writing, 0), read(writing, -1))
        await writing
        if (await reader.contains([key]))[0]:
            await reader.delete([key])
        replacing = asyncio.ensure_future(replace())
        await asyncio.gather(read(replacing, 0), read(replacing, -1))
        await replacing
    expect(not torn, f"C6: while {size} equal bytes were stored and deleted, a load answered {''.join(torn[:1])}")


async def _expect_all_or_nothing(rig: Rig, client: Client, store_by: Callable[..., Coroutine[Any, Any, Any]]) -> None:
    """Let stores fail and be cancelled at each of their thread calls, and after some turns of the loop."""
    wanted = content(10_000)
    for how in ("failed", "was cancelled"):
        for number in range(1, MAX_HELD_CALLS):
            key, other = rig.keys(2)
            async with client.storing([key, other], [10_000] * 2):
                client.calls.script(**{"fail" if how == "failed" else "hold": {number}})
                sources = [memoryview(bytearray(wanted)) for _ in range(2)]
                store = await held_or_done(client, store_by([key, other], sources))
                reached = client.calls.count >= number
                if how != "failed":
                    store.cancel()
                client.calls.open()
                await ended(store)
                await rig.settle()
            for one in (key, other):
                await _expect_whole_or_absent(client, one, wanted, f"after its store {how} at thread call {number}")
            if not reached:
                break
    for count in range(MAX_TURNS):
        key = rig.key()
        async with client.storing([key], [10_000]):
            client.calls.script()
            store = asyncio.ensure_future(store_by([key], [memoryview(bytearray(wanted))]))
            await turns(count)
            store.cancel()
            await ended(store)
            await rig.settle()
        await _expect_whole_or_absent(
            client, key, wanted, f"after its store was cancelled after {count} turns of the event loop"
        )


async def _expect_whole_or_absent(client: Client, key: ObjectKey, wanted: bytes, when: str) -> None:
    outcome, got = await client.get(key, len(wanted))
    expect(outcome in (HIT, MISS), f"C6: loading an object {when} answered {outcome.name}; it must be whole or absent")
    if outcome is HIT:
        expect_bytes("C6", f"an object {when}", got, wanted)


async def _expect_listed_if_whole(client: Client, key: ObjectKey, which: str, size: int | None = None) -> None:
    """Check that a listing has ``key`` only if ``contains`` finds it, and with ``size`` bytes if that is given."""
    for found in [found for found in await client.listed() if found.key == key]:
        expect(
            size in (None, found.nbytes),
            f"C18: list_objects gave an object {which} {found.nbytes} bytes; it has {size} when it is whole",
        )
        there = (await client.contains([key]))[0]
        expect(there, f"C18: list_objects lists an object {which}; contains says {there}")


def _next_call_or_end(client: Client, task: asyncio.Task[object], number: int) -> bool:
    return task.done() or (client.calls.waiting > 0 and client.calls.count > number)
