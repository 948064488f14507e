"""Clauses about the order of eviction: C20 and C21. They need the capability ``spares``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.testing.contract.capacity import (
    CAPACITY_BYTES,
    MAX_OBJECTS,
    MIN_OBJECTS,
    OBJECT_BYTES,
    store_with_patience,
)
from offload_core.testing.contract.checks import contract_test, expect, expect_bytes
from offload_core.testing.rig.clients import Client, Rig, content


class SparesContract:
    """Spare objects take free capacity only and are evicted first; touches set the order of eviction."""

    if TYPE_CHECKING:  # the clauses about names have it
        many_objects: int

    @contract_test
    async def test_c20_a_spare_object_evicts_nothing(self, sparing_rig: Rig) -> None:
        client = await sparing_rig.client()
        stored = [*await _store_kept(sparing_rig, client), *await _fill_with_spares(sparing_rig, client)]
        await _expect_all_present(client, stored, "were stored one by one")
        keys = sparing_rig.keys(MAX_OBJECTS)
        reservation = await client.prepare_store(keys, [OBJECT_BYTES] * len(keys), [True] * len(keys))
        await reservation.release()
        expect(
            not reservation.evicted,
            f"C20: a batch of {len(keys)} spare objects evicted {len(reservation.evicted)} others",
        )
        await _expect_all_present(client, stored, "were requested in one batch")

    @contract_test
    async def test_c20_spare_objects_are_evicted_before_all_kept_ones(self, sparing_rig: Rig) -> None:
        client = await sparing_rig.client()
        kept = await _store_kept(sparing_rig, client)
        spare = await _fill_with_spares(sparing_rig, client)
        await _expect_order("C20", "spare objects, older kept ones", sparing_rig, client, [spare, kept])

    @contract_test
    async def test_c20_a_spare_object_that_was_loaded_is_kept(self, sparing_rig: Rig) -> None:
        client = await sparing_rig.client()
        kept = await _store_kept(sparing_rig, client)
        spare, loaded = await _fill_with_spares(sparing_rig, client), []
        for load_by in client.ways_to_load:
            loaded.append(spare.pop())
            (outcome,) = await load_by(loaded[-1:], [memoryview(bytearray(OBJECT_BYTES))])
            expect(outcome is LoadOutcome.HIT, f"C20: loading a spare object answered {outcome.name}, not HIT")
        order = [spare, kept, loaded]
        names = "spare objects, older kept ones, spare ones that were loaded"
        await _expect_order("C20", names, sparing_rig, client, order)

    @contract_test
    async def test_c21_touches_set_the_order_of_eviction(self, sparing_rig: Rig) -> None:
        client = await sparing_rig.client()
        keys = await _store_kept(sparing_rig, client, MAX_OBJECTS // 2)
        touched = [*keys[1::2], *keys[-2::-2]]
        asked = [*sparing_rig.keys(self.many_objects), *touched]  # most are absent, and a touch goes to its end
        await client.touch(asked, [False] * len(asked))
        await _expect_order("C21", "objects in the order of their touches", sparing_rig, client, _one_by_one(touched))

    @contract_test
    async def test_c21_a_touch_says_whether_an_object_is_spare(self, sparing_rig: Rig) -> None:
        client = await sparing_rig.client()
        keys = await _store_kept(sparing_rig, client, MAX_OBJECTS // 2)
        kept, spare, kept_again = keys[:2], keys[2:6], keys[6:]
        await client.touch([*spare, *kept_again], [True] * len([*spare, *kept_again]))
        await client.touch(kept_again, [False] * len(kept_again))
        order = _one_by_one([*spare, *kept, *kept_again])
        names = "objects that a touch made spare, other ones, and those that a later touch kept"
        await _expect_order("C21", names, sparing_rig, client, order)

    @contract_test
    async def test_c21_a_touch_neither_makes_nor_loses_an_object(self, sparing_rig: Rig) -> None:
        client = await sparing_rig.client()
        objects = {key: content(1000, seed) for seed, key in enumerate(sparing_rig.keys(4))}
        for key, wanted in objects.items():
            await client.put({key: wanted})
        absent = sparing_rig.keys(2)
        for spare in (True, False):
            await client.touch([], [])
            keys = [absent[0], *objects, absent[1]]
            await client.touch(keys, [spare] * len(keys))
            found = await client.contains(keys)
            expect(
                found == [False, *[True] * len(objects), False],
                f"C21: absent, {len(objects)} stored and absent objects were touched with spare={spare}; "
                f"contains says {found}",
            )
            for key, wanted in objects.items():
                outcome, got = await client.get(key, len(wanted))
                expect(outcome is LoadOutcome.HIT, f"C21: loading a touched object answered {outcome.name}, not HIT")
                expect_bytes("C21", "a touched object", got, wanted)


async def _store_kept(rig: Rig, client: Client, count: int = MIN_OBJECTS) -> list[ObjectKey]:
    keys = rig.keys(count)
    for key in keys:
        await client.put({key: bytes(OBJECT_BYTES)})
    return keys


async def _fill_with_spares(rig: Rig, client: Client) -> list[ObjectKey]:
    """Offer more spare objects than fit, after a few kept ones; return those that are stored."""
    stored: list[ObjectKey] = []
    for key in rig.keys(2 * MAX_OBJECTS):
        outcomes = await client.store({key: bytes(OBJECT_BYTES)}, spare=True)
        stored += [key] if outcomes == [StoreOutcome.STORED] else []
    expect(
        len(stored) >= MIN_OBJECTS,
        f"C20: {MIN_OBJECTS} objects of {OBJECT_BYTES} bytes are stored under a limit of {CAPACITY_BYTES}; "
        f"of {2 * MAX_OBJECTS} spare ones only {len(stored)} were stored beside them",
    )
    return stored


async def _expect_all_present(client: Client, keys: Sequence[ObjectKey], how: str) -> None:
    gone = (await client.contains(keys)).count(False)
    expect(not gone, f"C20: spare objects {how}, and {gone} of {len(keys)} stored objects are gone")


def _one_by_one(keys: Sequence[ObjectKey]) -> list[list[ObjectKey]]:
    return [[key] for key in keys]


async def _expect_order(
    clause: str, names: str, rig: Rig, client: Client, groups: Sequence[Sequence[ObjectKey]]
) -> None:
    """Store further objects until all groups but the last are gone; each group must go before the next.

    The order stays unchecked if the medium evicts nothing for a while.
    """
    for _ in range(4 * MAX_OBJECTS):
        if not await store_with_patience(client, rig.key()):
            return
        # The later groups first: an eviction between two questions then looks right in any case.
        left = [sum(await client.contains(group)) for group in reversed(groups)][::-1]
        missing = [len(group) - count for group, count in zip(groups, left, strict=True)]
        for earlier, count in enumerate(left):
            expect(
                not count or not any(missing[earlier + 1 :]),
                f"{clause}: the order of eviction should be: {names}. "
                f"Of these groups of {[len(group) for group in groups]} objects, {left} are left",
            )
        if not any(left[:-1]):
            return
    raise AssertionError(
        f"{clause}: the order of eviction should be: {names}. "
        f"After {4 * MAX_OBJECTS} stores, {left} objects of these groups are left"
    )
