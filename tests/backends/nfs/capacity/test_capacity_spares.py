"""Spare objects and touches under the shared account, on simulated hosts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from offload_backend_nfs.capacity import usage_log
from offload_backend_nfs.capacity.account_options import AccountOptions
from offload_backend_nfs.capacity.control_record import decompress, unseal
from offload_backend_nfs.capacity.quota import ObjectReservation
from offload_backend_nfs.capacity.usage_log import UsageLog, recency

from offload_core.api import EvictionOrder
from offload_core.api.backend import StoreOutcome
from offload_core.api.keys import ObjectKey
from tests.backends.nfs.capacity.simulation import Host, World
from tests.backends.nfs.capacity.test_capacity import GRACE, LEASE, REJECTED, STORED, existing, joined, pass_time
from tests.backends.nfs.conftest import Nfs, key
from tests.support.tier_log import LOG

ALREADY_PRESENT = StoreOutcome.ALREADY_PRESENT


@pytest.fixture
def world() -> World:
    return World()


def put(host: Host, *numbers: int, spare: bool = False, size: int = 100) -> list[StoreOutcome]:
    """Store objects one after the other, a second each."""
    outcomes: list[StoreOutcome] = []
    for number in numbers:
        host.do(partial(_put_one, host, key(number), size, spare, outcomes))
        host.world.seconds += 1
    return outcomes


def _put_one(host: Host, one: ObjectKey, size: int, spare: bool, outcomes: list[StoreOutcome]) -> None:
    outcomes += host.put([one], [size], [spare])


def touch(host: Host, numbers: Sequence[int], spare: Sequence[bool]) -> None:
    host.bounded_store.touch([key(number) for number in numbers], spare)


def evict(world: World, hosts: Sequence[Host], *numbers: int) -> list[int]:
    """Store objects above the high watermark; return the objects that are left in the end."""
    put(hosts[0], *numbers)
    pass_time(world, hosts, GRACE + 20)
    return existing(world)


def test_spare_objects_of_another_host_are_evicted_first_the_least_recently_used_before_the_others(
    world: World,
) -> None:
    housekeeper, other = joined(world), joined(world)
    put(housekeeper, 0, 1, 2)
    put(other, 3, 4, 5, spare=True)
    put(housekeeper, 6, 7, 8)
    pass_time(world, [housekeeper, other], 40)  # the entries are flushed
    assert evict(world, [housekeeper, other], 9) == [0, 1, 2, 5, 6, 7, 8, 9]


def test_a_spare_object_gets_free_capacity_below_the_low_watermark_and_never_causes_an_eviction(
    world: World,
) -> None:
    host, other = joined(world), joined(world)
    assert put(host, *range(6)) == [STORED] * 6
    assert put(host, 6, 7, 8, spare=True) == [STORED, STORED, REJECTED]
    assert put(host, 20, size=150, spare=True) == [REJECTED]
    assert put(other, 21, spare=True) == [REJECTED]
    assert host.bounded_store.state.rejected_bytes == 0
    pass_time(world, [host, other], 2 * GRACE)
    assert existing(world) == list(range(8))
    put(host, 10)  # above the low watermark
    assert put(host, 20, size=1, spare=True) == [REJECTED]


def test_the_room_that_an_eviction_makes_is_not_for_spare_objects(world: World) -> None:
    host = joined(world)
    assert evict(world, [host], *range(10)) == list(range(2, 10))
    assert put(host, 20, spare=True) == [REJECTED]
    assert put(host, 21) == [STORED]


def test_unused_bytes_of_the_own_quota_are_no_capacity_for_spare_objects_above_the_low_watermark(
    world: World,
) -> None:
    host = joined(world)
    put(host, *range(8))
    reserved: list[ObjectReservation | None] = []
    host.do(lambda: reserved.extend(host.bounded_store.reserve([key(50)], [120]).reservations))
    assert reserved[0] is not None
    host.bounded_store._quota.end(reserved[0], written=False)  # not settled yet
    assert put(host, 20, spare=True) == [REJECTED]
    assert put(host, 21) == [STORED]


def test_spare_objects_take_no_capacity_while_a_kept_one_waits_for_an_eviction(world: World) -> None:
    host = joined(world)
    put(host, *range(5))
    assert put(host, 20, size=600) == [REJECTED]
    assert put(host, 21, spare=True) == [REJECTED]
    pass_time(world, [host], GRACE + 20)
    assert put(host, 20, size=600) == [STORED]


def test_a_rejected_object_waits_for_no_eviction_once_there_is_room(world: World) -> None:
    host = joined(world)
    put(host, *range(5))
    assert put(host, 20, size=600) == [REJECTED]
    host.do(lambda: host.bounded_store.delete([key(0), key(1)]))
    assert put(host, 21, 22, 23, spare=True) == [STORED] * 3
    pass_time(world, [host], GRACE + 20)
    assert existing(world) == [2, 3, 4, 21, 22, 23]


def test_a_process_that_has_not_heard_of_it_takes_no_capacity_for_spare_objects_either(world: World) -> None:
    options = AccountOptions(1000, grace_seconds=GRACE, lease_seconds=LEASE, quota_unit_bytes=100)
    host, other = joined(world, options), joined(world, options)
    assert put(other, 50, size=10) == [STORED]
    assert put(host, *range(4)) == [STORED] * 4
    assert put(host, 20, size=600) == [REJECTED]
    outcomes: list[StoreOutcome] = []
    other.do(lambda: outcomes.extend(other.put([key(21), key(22)], [80, 80], [True, True])))
    assert outcomes == [REJECTED] * 2
    assert other.bounded_store.state.members[other.bounded_store.member_id].quota_bytes == 110


def test_of_one_batch_the_kept_objects_get_capacity_first(world: World) -> None:
    host = joined(world)
    outcomes: list[StoreOutcome] = []
    numbers, flags = range(12), [True, False] * 6
    host.do(lambda: outcomes.extend(host.put([key(number) for number in numbers], [100] * 12, flags)))
    assert outcomes == [STORED] * 4 + [REJECTED, STORED] * 4


def test_an_object_that_is_offered_as_spare_again_stays_as_it_is(world: World) -> None:
    host = joined(world)
    put(host, 0, 1, 2)
    put(host, 3, 4, spare=True)
    assert put(host, 0, 3, spare=True) == [ALREADY_PRESENT] * 2
    assert put(host, 1, 4) == [ALREADY_PRESENT] * 2
    assert evict(world, [host], *range(5, 10)) == [1, 2, 4, 5, 6, 7, 8, 9]


def test_touches_set_the_order_of_eviction_and_a_use_keeps_a_spare_object(world: World) -> None:
    housekeeper, other = joined(world), joined(world)
    put(housekeeper, *range(9))
    touch(other, [5, 3, 4, 2], [True] * 4)
    touch(other, [1, 0], [False, False])
    other.bounded_store.mark_used([key(3)])
    pass_time(world, [housekeeper, other], 40)
    touch(housekeeper, [77, 78], [True, False])  # absent
    assert evict(world, [housekeeper, other], 9) == [0, 1, 2, 3, 6, 7, 8, 9]
    assert evict(world, [housekeeper, other], 10, 11) == [0, 1, 3, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("spare", [False, True])
def test_a_touch_withdraws_a_pending_object_only_if_it_is_kept(world: World, spare: bool) -> None:
    housekeeper, other = joined(world), joined(world)
    put(housekeeper, *range(10))
    housekeeper.do(housekeeper.bounded_store.step)
    (batch,) = housekeeper.bounded_store.state.pending_evictions
    victim = next(number for number in range(10) if key(number).path.encode() in world.files[f"condemned/{batch}"])
    other.do(other.bounded_store.refresh)
    touch(other, [victim], [spare])
    pass_time(world, [housekeeper, other], GRACE + 20)
    assert (victim in existing(world)) == (not spare)


def test_a_touch_of_a_pinned_object_does_not_make_it_spare(world: World) -> None:
    host = joined(world)
    put(host, *range(9))
    host.do(lambda: host.pin([key(8)]))
    touch(host, [8], [True])
    host.unpin()
    assert evict(world, [host], 9) == [2, 3, 4, 5, 6, 7, 8, 9]


def test_the_uses_of_an_object_that_is_pinned_during_a_scan_still_count_later(world: World) -> None:
    host = joined(world)
    put(host, *range(9))
    host.do(lambda: host.pin([key(0)]))
    host.bounded_store.mark_used([key(0)])  # as a load does; the last of all uses
    assert evict(world, [host], 9) == [0, 3, 4, 5, 6, 7, 8, 9]
    host.unpin()
    assert evict(world, [host], 10, 11) == [0, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("spare_first", [False, True])
def test_an_object_that_two_hosts_store_at_once_is_kept_if_either_keeps_it(world: World, spare_first: bool) -> None:
    one, other = joined(world), joined(world)
    one.start(lambda: one.put([key(0)], [100], [spare_first]))
    while not one.in_a_write:
        one.advance()
    other.start(lambda: other.put([key(0)], [100], [not spare_first]))
    while not other.in_a_write:
        other.advance()
    one.finish()
    other.finish()
    assert put(one, 1, 2, spare=True) == [STORED] * 2
    pass_time(world, [one, other], 40)
    assert evict(world, [one, other], *range(3, 10)) == [0, 3, 4, 5, 6, 7, 8, 9]


def test_an_object_that_another_host_stores_again_later_is_kept(world: World) -> None:
    host, other = joined(world), joined(world)
    put(host, 10)
    put(host, 0, 1, spare=True)
    pass_time(world, [host, other], 40)  # the entries are flushed
    other.do(lambda: other.discard([key(0)]))
    assert put(other, 0) == [STORED]
    assert put(host, *range(2, 8)) == [STORED] * 6
    assert evict(world, [host, other], 8) == [0, 2, 3, 4, 5, 6, 7, 8]


def test_an_object_that_is_stored_again_before_the_log_is_flushed_is_kept(world: World) -> None:
    host = joined(world)
    put(host, 10)
    put(host, 0, 1, spare=True)
    host.do(lambda: host.discard([key(0)]))
    assert put(host, 0, *range(2, 8)) == [STORED] * 7
    assert evict(world, [host], 8) == [0, 2, 3, 4, 5, 6, 7, 8]


def test_an_evicted_object_that_is_stored_again_at_once_is_kept(world: World) -> None:
    host = joined(world, AccountOptions(1000, grace_seconds=0, lease_seconds=LEASE))
    put(host, 0, 1, 2)
    put(host, 3, 4, spare=True)
    put(host, *range(5, 10))
    host.do(host.bounded_store.step)
    assert existing(world) == [0, 1, 2, 5, 6, 7, 8, 9]
    assert put(host, 3, 10) == [STORED] * 2
    host.do(host.bounded_store.step)
    assert existing(world) == [2, 3, 5, 6, 7, 8, 9, 10]


def test_a_negative_time_on_the_medium_stands_for_spare_and_the_latest_entry_counts(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_log, "_MERGE_AT_FILES", 3)
    host = Host(world, joined(world).bounded_store._lease._options)
    log = UsageLog(host, lambda: world.seconds, lambda: world.seconds, LOG)
    merged: dict[ObjectKey, float] = {}

    def flush_each() -> None:
        log.record_touches([(key(0), True), (key(1), False)])
        log.flush()
        (name,) = [name for name in world.files if name.startswith("touches/")]
        body = decompress(unseal("touches", world.files[name], name.removeprefix("touches/")), 1000)
        assert body.decode() == f"{key(0).path} -1000.0\n{key(1).path} 1000.000001\n"
        world.seconds += 1
        log.record_touches([(key(0), False), (key(1), True)])
        log.flush()
        log.record_touches([(key(2), True)])
        log.flush()
        log.merge()  # replaces the three files by one
        merged.update(UsageLog(host, lambda: world.seconds, lambda: world.seconds, LOG).merge())

    host.do(flush_each)
    assert [merged[key(number)] < 0 for number in range(3)] == [False, True, True]
    assert len([name for name in world.files if name.startswith("touches/")]) == 1


def test_the_order_does_not_stay_ahead_of_a_clock_that_is_set_back(world: World) -> None:
    host = Host(world, joined(world).bounded_store._lease._options)
    log = UsageLog(host, lambda: world.seconds, lambda: world.seconds, LOG)
    log.record([key(0)])
    world.seconds -= 500
    log.record([key(1)])
    host.do(log.flush)
    merged: dict[ObjectKey, float] = {}
    host.do(lambda: merged.update(log.merge()))
    assert merged == {key(0): 500.0, key(1): 500.0}


def test_uses_by_a_clock_that_is_ahead_grow_old(world: World) -> None:
    host = joined(world)
    log = UsageLog(host, lambda: world.seconds, lambda: world.seconds + 1e8, LOG)
    put(host, *range(9))
    log.record_touches([(key(0), False), (key(1), False)])
    host.do(log.flush)
    pass_time(world, [host], 150)  # the log is merged
    touch(host, range(2, 9), [False] * 7)
    pass_time(world, [host], 40)
    assert evict(world, [host], 9) == [2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("whose", ["housekeeper", "other"])
@pytest.mark.parametrize("seconds", [30.0, 3600.0, 1e8, -30.0, -3600.0, -1e8])
def test_a_wrong_clock_of_one_host_leaves_the_order_of_the_others(world: World, whose: str, seconds: float) -> None:
    world.seconds = 1e9
    housekeeper, other, third = joined(world), joined(world), joined(world)
    put(other, *range(5))
    put(other, 6, 7, 8, spare=True)  # up to the low watermark
    put(other, 5)
    pass_time(world, [housekeeper, other, third], 3000)
    world.clock_errors[{"housekeeper": housekeeper, "other": other}[whose]] = seconds
    touch(third, [8, 7], [True, True])
    touch(third, [5, 4, 3, 2, 1, 0], [False] * 6)
    pass_time(world, [housekeeper, other, third], 160)  # the log is flushed and merged
    assert evict(world, [housekeeper, other, third], 9) == [0, 1, 2, 3, 4, 5, 7, 9]
    assert evict(world, [housekeeper, other, third], 10, 11) == [0, 1, 2, 3, 4, 9, 10, 11]
    assert evict(world, [housekeeper, other, third], 12, 13) == [0, 1, 2, 9, 10, 11, 12, 13]


@pytest.mark.parametrize("seconds", [30.0, 3600.0, 1e8])
def test_the_spare_objects_and_the_order_of_a_host_whose_clock_is_ahead_stay(world: World, seconds: float) -> None:
    world.seconds = 1e9
    housekeeper, other = joined(world), joined(world)
    world.clock_errors[other] = seconds
    put(other, *range(5))
    put(other, 6, 7, 8, spare=True)  # up to the low watermark
    put(other, 5)
    touch(other, [5, 4, 3, 2, 1, 0], [False] * 6)
    pass_time(world, [housekeeper, other], 160)  # the log is flushed and merged
    assert evict(world, [housekeeper, other], 9) == [0, 1, 2, 3, 4, 5, 8, 9]
    assert evict(world, [housekeeper, other], 10, 11) == [0, 1, 2, 3, 4, 9, 10, 11]


VERBS = ["store", "store as spare", "use", "touch", "touch as spare", "discard"]


@given(steps=st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 5)), max_size=30))
def test_the_order_of_eviction_is_the_public_one(steps: list[tuple[str, int]]) -> None:
    world = World()
    host = joined(world)
    order: EvictionOrder[int] = EvictionOrder("lru", 0)
    for verb, number in steps:
        spare, there = verb.endswith("as spare"), number in order
        world.seconds += 1
        if verb.startswith("store") and not there:
            assert put(host, number, size=10, spare=spare) == [STORED]
            order.add(number, 10, spare=spare)
        elif verb.startswith("touch") and there:
            touch(host, [number], [spare])
            order.touch(number, spare=spare)
        elif verb == "use" and there:
            host.bounded_store.mark_used([key(number)])
            order.record_use(number)
        elif verb == "discard" and there:
            host.do(partial(host.discard, [key(number)]))
            order.remove(number)
    log = host.bounded_store._usage_log
    host.do(log.flush)
    entries: dict[ObjectKey, float] = {}
    host.do(lambda: entries.update(log.merge()))
    found = sorted(world.objects, key=lambda one: recency(entries.get(one, 0.0), world.objects[one][1]))
    wanted = []
    while len(order):
        wanted.append(order.next_victim())
        order.remove(wanted[-1])
    assert found == [key(number) for number in wanted]


def test_the_backend_passes_on_flags_and_touches(nfs: Nfs, tmp_path: Path) -> None:
    async def main() -> None:
        backend = nfs(url=f"file://{tmp_path}/objects", capacity="1MiB", low_watermark=0.9, eviction_grace=0)
        await backend.open()
        assert backend.capabilities.spares
        size = 100 * 1024
        for number in range(12):
            reservation = await backend.prepare_store([key(number)], [size], [number >= 5])
            if reservation.outcomes == (None,):
                await backend.store([key(number)], [memoryview(bytes(size))])
            else:
                assert backend._reservations is not None
                assert not backend._reservations._wake.is_set(), "an eviction for a spare object"
            await reservation.release()
        await backend.touch([key(0), key(8)], [True, False])
        assert list(await backend.contains([key(number) for number in range(10)])) == [True] * 9 + [False]
        while not (await backend.contains([key(20)]))[0]:
            reservation = await backend.prepare_store([key(20)], [2 * size])
            if reservation.outcomes == (None,):
                await backend.store([key(20)], [memoryview(bytes(2 * size))])
            await reservation.release()
            await asyncio.sleep(0.02)
        limit = time.monotonic() + 60
        while any(await backend.contains([key(5), key(6)])):
            assert time.monotonic() < limit, "housekeeping does not go on evicting"
            await asyncio.sleep(0.02)
        left = list(await backend.contains([key(number) for number in range(9)]))
        assert left[1:5] == [True] * 4
        assert not any(left[5:7])
        assert left[8]
        await backend.close()

    asyncio.run(main())
