"""Clauses about names, long and many: C1, C2, C12 and C18."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice

from offload_core.api.backend import LoadOutcome
from offload_core.api.keys import ObjectKey
from offload_core.testing.contract.checks import contract_test, expect, expect_bytes, expect_results
from offload_core.testing.rig.clients import Client, Rig, content

HIT, MISS = LoadOutcome.HIT, LoadOutcome.MISS
STORED_AT_ONCE = 128
"""Number of objects of a store in the tests with many objects: the most that the core stores at once."""
LOADED_AT_ONCE = 2 * STORED_AT_ONCE
"""Number of keys of a load in the tests with many objects: the most that the core loads at once."""


class NamesContract:
    """Every name is a name of its own, however long it is and however many there are."""

    many_objects = 1_100
    """Number of objects in the tests of large batches; a page of most servers ends at 1,000 names.

    Lower it if a medium takes minutes for so many.
    """

    @contract_test
    async def test_c01_long_names_are_not_cut(self, rig: Rig) -> None:
        client = await rig.client()
        packs, hashes = ("p" * 63 + "0", "p" * 63 + "1"), (b"\x5a" * 63 + b"\0", b"\x5a" * 63 + b"\1")
        namespaces = ("ab" * 31 + "a0", "ab" * 31 + "a1")
        keys = [ObjectKey(namespaces[0], pack, chunk_hash) for pack in packs for chunk_hash in hashes]
        keys.append(ObjectKey(namespaces[1], packs[0], hashes[0]))
        objects = {key: content(64, seed) for seed, key in enumerate(keys)}
        await client.put(objects)
        for key, wanted in objects.items():
            outcome, got = await client.get(key, 64)
            expect(outcome is HIT, f"C1: {key} answered {outcome.name} after keys that end otherwise were stored")
            expect_bytes("C1", f"{key}, which was stored with keys that end otherwise,", got, wanted)

    @contract_test
    async def test_c01_a_key_that_begins_like_a_stored_one_is_absent(self, rig: Rig) -> None:
        client = await rig.client()
        stored = rig.key()
        await client.put({stored: content(64)})
        alike = _alike(stored)
        found = await client.contains(alike)
        for key, there in zip(alike, found, strict=True):
            expect(not there, f"C1: contains found {key} after {stored} was stored")
            outcome, _ = await client.get(key, 64)
            expect(outcome is MISS, f"C1: loading {key} answered {outcome.name} after {stored} was stored")

    @contract_test
    async def test_c02_a_large_batch_is_answered_to_its_end(self, rig: Rig) -> None:
        client = await rig.client()
        stored = await _store_many(rig, client, self.many_objects)
        keys = [key for pair in zip(stored, rig.keys(len(stored)), strict=True) for key in pair]
        _expect_each("C2", "contains", keys, await client.contains(keys), [True, False] * len(stored))
        async with client.loading(keys) as load:
            present = [bool(there) for there in load.present]
        _expect_each("C2", "prepare_load", keys, present, [True, False] * len(stored))
        loaded = [(key, stored.get(key, b"absent")) for key in keys[:LOADED_AT_ONCE]]
        buffers = [bytearray(len(wanted)) for _, wanted in loaded]
        some = keys[:LOADED_AT_ONCE]
        outcomes = await client.load(some, [memoryview(buffer) for buffer in buffers])
        _expect_each("C2", "load_into", some, outcomes, [HIT, MISS] * (len(some) // 2))
        for (key, wanted), buffer in list(zip(loaded, buffers, strict=True))[::2]:
            expect_bytes("C2", f"the buffer of {key} in a batch of {len(some)} keys", buffer, wanted)

    @contract_test
    async def test_c12_a_delete_leaves_keys_that_begin_alike(self, rig: Rig) -> None:
        client = await rig.client()
        stored = rig.key()
        await client.put({stored: content(64)})
        for key in _alike(stored):
            await client.delete([key])
            there = await client.contains([stored])
            expect_results("C12", f"contains([{stored}]), after a delete of {key},", there, [True])

    @contract_test
    async def test_c12_a_large_batch_is_deleted_to_its_end(self, rig: Rig) -> None:
        client = await rig.client()
        keys = list(await _store_many(rig, client, self.many_objects))
        await client.delete(keys)
        left: list[ObjectKey] = []
        for start in range(0, len(keys), STORED_AT_ONCE):
            left += await client.present(keys[start : start + STORED_AT_ONCE])
        expect(not left, f"C12: of {len(keys)} objects that one call deleted, {len(left)} are still present")

    @contract_test
    async def test_c18_a_listing_goes_to_its_end(self, listing_rig: Rig) -> None:
        client = await listing_rig.client()
        keys = await _store_many(listing_rig, client, self.many_objects)
        counts = Counter(found.key for found in await client.listed())
        missing = [key for key in keys if key not in counts]
        expect(not missing, f"C18: of {len(keys)} objects, list_objects does not list {len(missing)}")
        twice = sum(count > 1 for count in counts.values())
        expect(not twice, f"C18: of {len(keys)} objects, list_objects lists {twice} more than once")


def _alike(key: ObjectKey) -> list[ObjectKey]:
    """Return keys that are beginnings of ``key``, and keys of which it is a beginning."""
    chunk_hash = key.chunk_hash
    return [
        *(key._replace(chunk_hash=one) for one in (chunk_hash[:-1], chunk_hash[:1], chunk_hash + b"\1")),
        *(key._replace(pack=one) for one in (key.pack[:-1], f"{key.pack}0", f"{key.pack}-1")),
    ]


async def _store_many(rig: Rig, client: Client, count: int) -> dict[ObjectKey, bytes]:
    objects = {key: b"%d" % number for number, key in enumerate(rig.keys(count))}
    for start in range(0, count, STORED_AT_ONCE):
        await client.put(dict(islice(objects.items(), start, start + STORED_AT_ONCE)))
    return objects


def _expect_each(
    clause: str, call: str, keys: Sequence[ObjectKey], got: Sequence[object], wanted: Sequence[object]
) -> None:
    expect(len(got) == len(keys), f"{clause}: {call} gave {len(got)} answers for {len(keys)} keys")
    wrong = [index for index, (one, two) in enumerate(zip(got, wanted, strict=True)) if one != two]
    expect(
        not wrong,
        f"{clause}: {call} of {len(keys)} keys answered {len(wrong)} of them wrongly, the first at place "
        f"{wrong[0] if wrong else 0}",
    )
