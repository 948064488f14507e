"""Clauses about shorter ways for an object's bytes: C22, loads in one call; C25, lent memory; C26, stores that seal.

A load in one call answers as the separate steps do, and tells its check of final bytes. Lent memory needs the
capability ``lends``. A store that seals has the beginning of an object last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.api.memory.addresses import address_of
from offload_core.api.one_pass import CHECK_BYTES
from offload_core.testing.contract.capacity import MAX_OBJECTS, OBJECT_BYTES
from offload_core.testing.contract.checks import contract_test, expect, expect_bytes, expect_results
from offload_core.testing.rig.clients import Client, Rig, content
from offload_core.testing.rig.recording_check import RecordingCheck
from offload_core.testing.rig.recording_seal import RecordingSeal

HIT, MISS, CORRUPT = LoadOutcome.HIT, LoadOutcome.MISS, LoadOutcome.CORRUPT
CANARY = 0xA5
SIZES = (1, 4096, 70_001, CHECK_BYTES - 1, CHECK_BYTES, 3 * CHECK_BYTES + 1)
LENT = (1, 4096, 5000, 100_000)
"""Sizes of lent objects in bytes. A backend may lend some of them only."""


class OneCallContract:
    """Loads in one call, for a backend that declares them."""

    @contract_test
    async def test_c22_a_load_in_one_call_answers_as_its_steps_do(self, one_call_rig: Rig) -> None:
        client = await one_call_rig.client()
        small, large, absent = one_call_rig.keys(3)
        await client.put({small: content(100), large: content(9000)})
        keys = [large, absent, small, large, small, large, small]
        sizes = [9000, 50, 100, 9000, 99, 9001, 100]
        for count in (len(keys), 1, 0):
            by_steps, by_one_call = ([bytearray([CANARY]) * size for size in sizes[:count]] for _ in range(2))
            try:
                wanted = await client.load(keys[:count], [memoryview(buffer) for buffer in by_steps])
            except Exception:  # the tests of C2 tell that the steps fail
                continue
            if len(wanted) != count:
                continue
            views = [memoryview(buffer) for buffer in by_one_call]
            outcomes = await client.load_and_check(keys[:count], views, list(map(RecordingCheck, views)))
            expect_results("C22", "load_and_check", outcomes, wanted)
            for outcome, one, two in zip(outcomes, by_one_call, by_steps, strict=True):
                if outcome is not CORRUPT:
                    name = f"a buffer of {len(one)} bytes after {outcome.name} in one call, as by the steps,"
                    expect_bytes("C22", name, one, bytes(two))

    @contract_test
    async def test_c22_checks_are_told_of_final_bytes_in_order(self, one_call_rig: Rig) -> None:
        client = await one_call_rig.client()
        objects = {one_call_rig.key(): content(size) for size in SIZES}
        await client.put(objects)
        buffers = [bytearray([CANARY]) * len(wanted) for wanted in objects.values()]
        views = [memoryview(buffer) for buffer in buffers]
        checks = [RecordingCheck(view) for view in views]
        outcomes = await client.load_and_check(list(objects), views, checks)
        for outcome, check, buffer in zip(outcomes, checks, buffers, strict=True):
            expect(check.problem is None, f"C22: the check of an object of {len(buffer)} bytes got {check.problem}")
            if outcome is HIT:
                told = bytes(check.told)
                expect_bytes(
                    "C22",
                    f"an object of {len(buffer)} bytes, when its check was told,",
                    told,
                    bytes(buffer[: len(told)]),
                )


class SealingContract:
    """Stores that seal, for a backend that declares them."""

    @contract_test
    async def test_c26_a_store_that_seals_answers_as_a_store_does(self, sealing_rig: Rig) -> None:
        client = await sealing_rig.client()
        for count in (3, 1, 0):
            plain, sealing = sealing_rig.keys(count), sealing_rig.keys(count)
            outcomes = []
            for keys in (plain, sealing):
                await client.put({key: content(3000, 9) for key in keys[:1]})
                offered = [keys[at] for at in (1, 0, 2)] if count == 3 else keys
                views = [memoryview(bytearray(content(3000, 9))) for _ in offered]
                async with client.storing(offered, [3000] * len(offered)):
                    outcomes.append(
                        await client.store_from(offered, views)
                        if keys is plain
                        else await client.store_and_seal(offered, views, list(map(RecordingSeal, views)))
                    )
            wanted, got = outcomes
            expect_results("C26", "store_and_seal", got, wanted)

    @contract_test
    async def test_c26_an_object_is_stored_as_it_is_after_its_seal(self, sealing_rig: Rig) -> None:
        client = await sealing_rig.client()
        objects = {sealing_rig.key(): content(size, size) for size in SIZES}
        views = [memoryview(bytearray(wanted)) for wanted in objects.values()]
        async with client.storing(list(objects), list(map(len, views))):
            stored = await client.store_and_seal(list(objects), views, list(map(RecordingSeal, views)))
        expect_results("C26", "store_and_seal", stored, [StoreOutcome.STORED] * len(objects))
        await _expect_stored("C26", client, objects, "stored by a store that seals")


class LendingContract:
    """Views of reservations have the objects' bytes, until the release."""

    @contract_test
    async def test_c25_a_view_of_a_load_has_the_objects_bytes(self, lending_rig: Rig) -> None:
        client = await lending_rig.client()
        objects = {lending_rig.key(): content(size, size) for size in LENT}
        await client.put(objects)
        absent = lending_rig.key()
        async with client.loading([*objects, absent, next(iter(objects))]) as reservation:
            *views, of_absent, again = _views("prepare_load", reservation.lend(), len(objects) + 2)
            expect(of_absent is None, "C25: prepare_load lent a view for an absent object")
            expect(
                any(views),
                f"C25: objects of {LENT} bytes were stored on an empty medium, and none of them is lent",
            )
            for view, wanted in zip([*views, again], [*objects.values(), content(LENT[0], LENT[0])], strict=True):
                if view is not None:
                    expect_bytes("C25", f"the view of an object of {len(wanted)} bytes", bytes(view), wanted)

    @contract_test
    async def test_c25_a_view_of_a_load_outlives_deletes_and_evictions(self, lending_bounded_rig: Rig) -> None:
        client = await lending_bounded_rig.client()
        objects = {key: content(OBJECT_BYTES, seed) for seed, key in enumerate(lending_bounded_rig.keys(4))}
        await client.put(objects)
        deleted = next(iter(objects))
        async with client.loading(list(objects)) as reservation:
            await client.delete([deleted])
            for seed in range(3 * MAX_OBJECTS):
                await client.store({lending_bounded_rig.key(): content(OBJECT_BYTES, 1000 + seed)})
            for view, wanted in zip(reservation.lend(), objects.values(), strict=True):
                if view is not None:
                    name = "the view of an object, after the delete of one and many stores,"
                    expect_bytes("C25", name, bytes(view), wanted)

    @contract_test
    async def test_c25_a_view_of_a_store_becomes_the_object(self, lending_rig: Rig) -> None:
        client = await lending_rig.client()
        objects = {lending_rig.key(): content(size, size) for size in LENT}
        await client.put({lending_rig.key(): content(3 * 4096, 5)})
        async with client.storing(list(objects), [len(wanted) for wanted in objects.values()]) as reservation:
            views = _views("prepare_store", reservation.lend(), len(objects))
            expect(
                any(views),
                f"C25: objects of {LENT} bytes are reserved on an empty medium, and none of them is lent",
            )
            expect_disjoint([view for view in views if view is not None])
            filled = {key: (wanted, view) for (key, wanted), view in zip(objects.items(), views, strict=True) if view}
            for wanted, view in filled.values():
                view[:] = wanted
            sources = [view.toreadonly() for _, view in filled.values()]
            stored = await client.store_from(list(filled), sources)
            expect_results("C25", "store of the lent views", stored, [StoreOutcome.STORED] * len(filled))
        await _expect_stored(
            "C25", client, {key: wanted for key, (wanted, _) in filled.items()}, "filled in its lent view"
        )

    @contract_test
    async def test_c25_a_store_of_other_memory_leaves_lent_memory_alone(self, lending_rig: Rig) -> None:
        client = await lending_rig.client()
        key, wanted = lending_rig.key(), content(5000)
        async with client.storing([key], [len(wanted)]) as lent:
            views = [view for view in lent.lend() if view is not None]
            async with client.storing([key], [len(wanted)]):
                (outcome,) = await client.store_from([key], [memoryview(bytearray(wanted))])
            expect(outcome is StoreOutcome.STORED, f"C25: a store beside a view of its key answered {outcome.name}")
            for view in views:
                view[:] = b"\x11" * len(view)
            await _expect_stored("C25", client, {key: wanted}, "stored while memory for it was lent")
        await _expect_stored("C25", client, {key: wanted}, "stored while memory for it was lent")

    @contract_test
    async def test_c25_two_reservations_of_one_key_have_memory_of_their_own(self, lending_rig: Rig) -> None:
        client = await lending_rig.client()
        key, wanted = lending_rig.key(), content(5000)
        async with client.storing([key], [len(wanted)]) as first, client.storing([key], [len(wanted)]) as second:
            views = [view for view in (*first.lend(), *second.lend()) if view is not None]
            expect_disjoint(views)
            for view in views:
                view[:] = wanted
            for view in reversed(views):
                (outcome,) = await client.store_from([key], [view.toreadonly()])
                good = (StoreOutcome.STORED, StoreOutcome.ALREADY_PRESENT)
                expect(outcome in good, f"C25: a store of a lent view answered {outcome.name}")
                if view is views[-1]:
                    views[0][:] = bytes(len(wanted))  # still the caller's, who may write anything
                    await _expect_stored("C25", client, {key: wanted}, "stored from one of two views of its key")
                    views[0][:] = wanted
        await _expect_stored("C25", client, {key: wanted}, "stored twice from two views of its key")

    @contract_test
    async def test_c25_what_is_written_to_a_view_that_is_not_stored_is_no_object(self, lending_rig: Rig) -> None:
        client = await lending_rig.client()
        before = {lending_rig.key(): content(5000, seed) for seed in range(3)}
        await client.put(before)
        await client.delete([next(iter(before))])
        del before[next(iter(before))]
        key = lending_rig.key()
        async with client.storing([key], [5000]) as reservation:
            for view in reservation.lend():
                if view is not None:
                    view[:] = b"\xee" * len(view)
            expect_results("C25", "contains of an object that was not stored", await client.contains([key]), [False])
        expect_results("C25", "contains after the release", await client.contains([key]), [False])
        await _expect_stored("C25", client, before, "stored before another one's view was filled")

    @contract_test
    async def test_c25_all_views_are_in_the_lent_memory(self, lending_rig: Rig) -> None:
        client = await lending_rig.client()
        objects = {lending_rig.key(): content(5000, seed) for seed in range(3)}
        await client.put(objects)
        memory = client.backend.lent_memory
        if memory is None:  # this process alone uses the views
            return
        start = address_of(memory.view)
        new = lending_rig.key()
        async with client.loading(list(objects)) as loading, client.storing([new], [5000]) as storing:
            for view in (*loading.lend(), *storing.lend()):
                if view is not None:
                    offset = address_of(view) - start
                    expect(
                        0 <= offset <= memory.nbytes - len(view),
                        f"C25: a view of {len(view)} bytes is at byte {offset} of a lent memory of {memory.nbytes}",
                    )


def expect_disjoint(views: Sequence[memoryview]) -> None:
    """Fail if two views share a byte."""
    pieces = sorted((address_of(view), len(view)) for view in views if len(view))
    for (start, nbytes), (after, _) in combinations(pieces, 2):
        expect(start + nbytes <= after, "C25: two views for objects to store share bytes")


def _views(call: str, views: Sequence[memoryview | None], count: int) -> Sequence[memoryview | None]:
    expect(len(views) == count, f"C25: {call} returned {len(views)} views for {count} keys")
    return views


async def _expect_stored(clause: str, client: Client, objects: Mapping[ObjectKey, bytes], how: str) -> None:
    for key, wanted in objects.items():
        _, got = await client.get(key, len(wanted))
        expect_bytes(clause, f"an object {how}", got, wanted)
