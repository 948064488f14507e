"""Clauses about bytes and outcomes: C1 to C4, C12, C16, C17 and C19."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.testing.contract.checks import (
    contract_test,
    expect,
    expect_bytes,
    expect_results,
    threads_that_alternate,
)
from offload_core.testing.rig.clients import Rig, content

HIT, MISS, CORRUPT = LoadOutcome.HIT, LoadOutcome.MISS, LoadOutcome.CORRUPT
HARMLESS = (StoreOutcome.STORED, StoreOutcome.ALREADY_PRESENT)
SIZES = (1, 2, 511, 512, 513, 4095, 4096, 4097, 65_537, 300_001)
CANARY = 0xA5


class BytesContract:
    """Stored bytes come back unchanged, and every key gets its own outcome."""

    @contract_test
    async def test_c01_a_load_returns_the_bytes_that_were_stored(self, rig: Rig) -> None:
        client = await rig.client()
        for size in SIZES:
            key, wanted = rig.key(), content(size, seed=1)
            await client.put({key: wanted})
            outcome, got = await client.get(key, size)
            expect(outcome is HIT, f"C1: loading {size} bytes that were stored answered {outcome.name}")
            expect_bytes("C1", f"an object of {size} bytes", got, wanted)

    @contract_test
    async def test_c01_keys_that_look_alike_name_objects_of_their_own(self, rig: Rig) -> None:
        client = await rig.client()
        first = rig.key()
        alike = [
            first,
            first._replace(namespace="cd" * 32),
            first._replace(pack="full-u25"),
            first._replace(pack="full-u256-1"),
            first._replace(chunk_hash=first.chunk_hash[:-1]),
            first._replace(chunk_hash=first.chunk_hash + b"\0"),
            first._replace(chunk_hash=first.chunk_hash * 2),
            first._replace(chunk_hash=first.chunk_hash[:1]),
        ]
        objects = {key: content(64, seed) for seed, key in enumerate(alike)}
        await client.put(objects)
        for key, wanted in objects.items():
            outcome, got = await client.get(key, 64)
            expect(outcome is HIT, f"C1: {key} answered {outcome.name} after keys like it were stored")
            expect_bytes("C1", f"{key}, which was stored with keys like it,", got, wanted)

    @contract_test
    async def test_c01_objects_that_are_stored_and_loaded_at_once_are_not_mixed(self, rig: Rig) -> None:
        client = await rig.client()
        objects = {key: content(4096, seed) for seed, key in enumerate(rig.keys(16))}
        with threads_that_alternate():
            await asyncio.gather(*(client.put({key: wanted}) for key, wanted in objects.items()))
            for number in range(4):
                load_by = client.ways_to_load[number % len(client.ways_to_load)]
                buffers = {key: bytearray(4096) for key in objects}
                loads = (load_by([key], [memoryview(buffer)]) for key, buffer in buffers.items())
                outcomes = await asyncio.gather(*loads)
                for (key, buffer), (outcome,) in zip(buffers.items(), outcomes, strict=True):
                    if outcome is HIT:  # the tests of C5 tell that it is absent
                        name = f"one of {len(objects)} objects that were stored and loaded at once"
                        expect_bytes("C1", name, buffer, objects[key])

    @contract_test
    async def test_c02_results_are_parallel_to_the_request(self, rig: Rig) -> None:
        client = await rig.client()
        small, large, absent, other = rig.keys(4)
        objects = {small: content(100), large: content(3000)}
        await client.put(objects)
        asked = [absent, large, other, small]
        expect_results("C2", "contains", await client.contains(asked), [False, True, False, True])
        expect_results("C2", "contains", await client.contains(asked[::-1]), [True, False, True, False])
        for keys in (asked, asked[::-1]):
            buffers = [bytearray(len(objects.get(key, b"12345"))) for key in keys]
            outcomes = await client.load(keys, [memoryview(buffer) for buffer in buffers])
            expect_results("C2", "load_into", outcomes, [HIT if key in objects else MISS for key in keys])
            for key, buffer in zip(keys, buffers, strict=True):
                if key in objects:
                    expect_bytes("C2", f"the buffer of {key} in a batch", buffer, objects[key])
        async with client.loading(asked) as load:
            expect(len(load.present) == 4, f"C2: prepare_load said {len(load.present)} results for 4 keys")
            expect(load.present[1] and load.present[3], f"C2: prepare_load said {load.present} for two that are there")
        async with client.storing(asked, [10, 3000, 10, 100]) as store:
            expect(len(store.outcomes) == 4, f"C2: prepare_store said {len(store.outcomes)} results for 4 keys")
            there = [store.outcomes[0], store.outcomes[2]]
            expect_results("C2", "prepare_store, for absent keys,", there, [None, None])

    @contract_test
    async def test_c02_an_empty_batch_has_an_empty_result(self, rig: Rig) -> None:
        client = await rig.client()
        expect_results("C2", "contains", await client.contains([]), [])
        expect_results("C2", "load_into", await client.load([], []), [])
        async with client.storing([], []) as store:
            expect_results("C2", "prepare_store", store.outcomes, [])
            expect_results("C2", "store", await client.store_from([], []), [])
        async with client.loading([]) as load:
            expect_results("C2", "prepare_load", load.present, [])
        await client.delete([])

    @contract_test
    async def test_c02_a_repeated_key_is_answered_every_time(self, rig: Rig) -> None:
        client = await rig.client()
        key, wanted = rig.key(), content(1000)
        async with client.storing([key] * 3, [1000] * 3) as reservation:
            expect(len(reservation.outcomes) == 3, f"C2: prepare_store said {reservation.outcomes} for one key 3 times")
            granted = reservation.outcomes.count(None)
            outcomes = await client.store_from([key] * granted, [memoryview(bytearray(wanted))] * granted)
        expect(
            len(outcomes) == granted and all(outcome in HARMLESS for outcome in outcomes),
            f"C2: store of one key {granted} times answered {outcomes}",
        )
        expect_results("C2", "contains", await client.contains([key] * 2), [True, True])
        buffers = [bytearray(1000) for _ in range(3)]
        expect_results("C2", "load_into", await client.load([key] * 3, [memoryview(b) for b in buffers]), [HIT] * 3)
        for number, buffer in enumerate(buffers):
            expect_bytes("C2", f"buffer {number} of 3 for one key", buffer, wanted)
        await client.delete([key, key])

    @contract_test
    async def test_c03_a_miss_leaves_its_buffer_untouched(self, rig: Rig) -> None:
        client = await rig.client()
        await client.put({rig.key(): content(1000)})
        for sizes in ((1,), (1000,), (70_000,), (10, 1000, 20)):
            buffers = [bytearray([CANARY]) * size for size in sizes]
            outcomes = await client.load(rig.keys(len(sizes)), [memoryview(buffer) for buffer in buffers])
            expect_results("C3", "load_into, for absent keys,", outcomes, [MISS] * len(sizes))
            for buffer in buffers:
                changed = next((i for i, byte in enumerate(buffer) if byte != CANARY), None)
                expect(
                    changed is None,
                    f"C3: a miss changed byte {changed} of its buffer "
                    f"from 0x{CANARY:02x} to 0x{buffer[changed or 0]:02x}",
                )

    @contract_test
    async def test_c04_storing_again_is_harmless(self, rig: Rig) -> None:
        client = await rig.client()
        key, wanted = rig.key(), content(5000)
        # Two engines that compute the same prefix both reserve before one of them stores.
        async with client.storing([key], [5000]) as first, client.storing([key], [5000]) as second:
            for number, reservation in enumerate((first, second), 1):
                if reservation.outcomes == (None,):
                    outcomes = await client.store_from([key], [memoryview(bytearray(wanted))])
                    expect(outcomes[0] in HARMLESS, f"C4: storing the same for time {number} answered {outcomes[0]}")
        outcome, got = await client.get(key, 5000)
        expect(outcome is HIT, f"C4: after storing the same twice a load answered {outcome.name}")
        expect_bytes("C4", "an object that was stored twice", got, wanted)

    @contract_test
    async def test_c04_storing_the_same_twice_at_once_is_harmless(self, rig: Rig) -> None:
        client = await rig.client()
        for seed in range(5):
            key, wanted = rig.key(), content(50_000, seed)
            async with client.storing([key], [50_000]) as first, client.storing([key], [50_000]) as second:
                stores = [
                    client.store_from([key], [memoryview(bytearray(wanted))])
                    for reservation in (first, second)
                    if reservation.outcomes == (None,)
                ]
                for outcomes in await asyncio.gather(*stores):
                    expect(outcomes[0] in HARMLESS, f"C4: one of two stores of the same at once answered {outcomes[0]}")
            outcome, got = await client.get(key, 50_000)
            expect(outcome is HIT, f"C4: after two stores at once a load answered {outcome.name}")
            expect_bytes("C4", "an object that was stored twice at once", got, wanted)

    @contract_test
    async def test_c12_deleting_what_is_not_there_is_no_error(self, rig: Rig) -> None:
        client = await rig.client()
        key, absent = rig.keys(2)
        await client.put({key: content(10)})
        await client.delete([absent])
        for _ in range(2):
            await client.delete([absent, key, absent])

    @contract_test
    async def test_c12_what_was_deleted_is_gone_and_the_rest_is_not(self, rig: Rig) -> None:
        client = await rig.client()
        gone, stays = rig.keys(2)
        await client.put({gone: content(10), stays: content(10)})
        await client.delete([gone])
        expect_results(
            "C12", "contains, after a delete of the first,", await client.contains([gone, stays]), [False, True]
        )
        outcomes = [(await client.get(key, 10))[0] for key in (gone, stays)]
        expect_results("C12", "load_into, after a delete of the first,", outcomes, [MISS, HIT])

    @contract_test
    async def test_c16_an_object_of_another_size_is_corrupt(self, rig: Rig) -> None:
        client = await rig.client()
        size = 1000
        for asked in (0, 1, size - 1, size + 1, 2 * size):
            key = rig.key()
            await client.put({key: content(size)})
            outcome, _ = await client.get(key, asked)
            expect(
                outcome is CORRUPT,
                f"C16: loading an object of {size} bytes into a buffer of {asked} answered {outcome.name}, not CORRUPT",
            )

    def damage(self, options: Mapping[str, Any], key: ObjectKey) -> None:
        """Truncate the stored object of ``key`` behind the backend's back; override this to test damaged objects.

        Args:
            options: the tier's own keys, which name the medium.
            key: the key of a stored object of 1,000 bytes.
        """
        raise NotImplementedError

    @contract_test
    async def test_c16_a_damaged_object_is_corrupt(self, rig: Rig) -> None:
        if type(self).damage is BytesContract.damage:
            pytest.skip("no method damage(self, options, key) that cuts an object short")
        client = await rig.client()
        key, size = rig.key(), 1000
        await client.put({key: content(size)})
        self.damage(rig.options, key)
        outcome, _ = await client.get(key, size)
        expect(outcome is CORRUPT, f"C16: loading an object that was cut short answered {outcome.name}, not CORRUPT")

    @contract_test
    async def test_c17_a_load_writes_nothing_beside_its_buffer(self, rig: Rig) -> None:
        client = await rig.client()
        for size in (1, 100, 511, 4096, 4097):
            objects = {key: content(size, seed) for seed, key in enumerate(rig.keys(3))}
            await client.put(objects)
            arena = bytearray([CANARY]) * (3 * size + 8192)
            starts = [1021 + number * (size + 1021) for number in range(3)]
            views = [memoryview(arena)[start : start + size] for start in starts]
            outcomes = await client.load(list(objects), views)
            expect_results("C17", "load_into, into parts of one buffer,", outcomes, [HIT] * 3)
            inside = {index for start in starts for index in range(start, start + size)}
            beside = next((i for i, byte in enumerate(arena) if byte != CANARY and i not in inside), None)
            expect(
                beside is None,
                f"C17: loads of {size} bytes at offsets {starts} changed byte {beside} beside them "
                f"from 0x{CANARY:02x} to 0x{arena[beside or 0]:02x}",
            )

    @contract_test
    async def test_c17_a_buffer_may_start_at_any_offset(self, rig: Rig) -> None:
        client = await rig.client()
        size = 4097
        for offset in (1, 3, 7, 63, 511):
            key, wanted = rig.key(), content(size, seed=offset)
            source = bytearray(offset) + wanted + bytearray(offset)
            async with client.storing([key], [size]):
                outcomes = await client.store_from([key], [memoryview(source)[offset : offset + size]])
            expect_results("C17", f"store from offset {offset}", outcomes, [StoreOutcome.STORED])
            target = bytearray(size + 2 * offset)
            outcomes_of_load = await client.load([key], [memoryview(target)[offset : offset + size]])
            expect_results("C17", f"load_into at offset {offset}", outcomes_of_load, [HIT])
            expect_bytes("C17", f"an object stored from and loaded to offset {offset}", target[offset:-offset], wanted)

    @contract_test
    async def test_c17_a_store_takes_a_read_only_buffer(self, rig: Rig) -> None:
        client = await rig.client()
        key, wanted = rig.key(), content(5000)
        async with client.storing([key], [5000]):
            outcomes = await client.store_from([key], [memoryview(wanted)])
        expect_results("C17", "store from a read-only buffer", outcomes, [StoreOutcome.STORED])
        _, got = await client.get(key, 5000)
        expect_bytes("C17", "an object stored from a read-only buffer", got, wanted)

    @contract_test
    async def test_c19_prepare_load_tells_the_size_of_what_is_there(self, sizing_rig: Rig) -> None:
        client = await sizing_rig.client()
        objects = {key: content(size) for key, size in zip(sizing_rig.keys(len(SIZES)), SIZES, strict=True)}
        await client.put(objects)
        (absent,), keys = sizing_rig.keys(1), list(objects)
        may_not_know = client.backend.capabilities.evicts
        asked = [keys[-1], absent, *keys, keys[0]]
        async with client.loading(asked) as load:
            expect(
                len(load.nbytes) == len(asked), f"C19: prepare_load told {len(load.nbytes)} sizes for {len(asked)} keys"
            )
            for key, there, told in zip(asked, load.present, load.nbytes, strict=True):
                size = len(objects[key]) if there else None
                right = told == size or (told is None and may_not_know)
                expect(right, f"C19: prepare_load says that {key} has {told} bytes; it should say {size}")

    @contract_test
    async def test_c19_an_object_that_was_replaced_has_its_new_size(self, sizing_rig: Rig) -> None:
        client = await sizing_rig.client()
        key = sizing_rig.key()
        for size in (1000, 700, 1200):
            await client.put({key: content(size)})
            async with client.loading([key]) as load:
                expect(
                    load.nbytes == (size,) or (load.nbytes == (None,) and client.backend.capabilities.evicts),
                    f"C19: prepare_load says {load.nbytes} bytes of an object that was deleted and stored with {size}",
                )
            await client.delete([key])
            if await client.contains([key]) == [True]:
                return  # the tests of C12 prove that a deleted object can be stored again
