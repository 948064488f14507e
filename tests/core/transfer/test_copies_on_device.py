"""Copies that go on after their calls: bytes, verdicts and leases wait for them, and the engine does not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from offload_core.objects.format import HEADER_BYTES
from offload_core.runtime.io_loop import IoLoop
from offload_core.transfer.loads import LoadResult
from tests.core.transfer.test_stores import LEASE, submit
from tests.support.held_copier import HeldCopier, copier
from tests.support.memory_backend import key
from tests.support.transfer_rig import PACK, SECONDS, Rig, item, number_of


@pytest.fixture
def rig(io: IoLoop) -> Iterator[Rig]:
    rig = Rig(io, make_copier=HeldCopier)
    yield rig
    copier(rig).let_go()
    rig.finish()


def have_stored(rig: Rig, *numbers: int) -> None:
    """Store blocks under their own numbers, with copies that do not wait."""
    copier(rig).let_go()
    assert all(rig.store_all(*(item(number, block=number) for number in numbers)).values())
    copier(rig).is_held = True


def test_an_object_is_sealed_and_stored_when_its_copy_has_ended(rig: Rig) -> None:
    backend = rig.add_memory_tier()
    engine = rig.start()
    stored = rig.kv_cache[1].clone()
    engine.submit_stores([item(1, block=1)])
    rig.kv_cache[1].random_()  # the engine uses the block again
    assert not engine.drain_stores(0.1), "the store waits for its copy"
    assert backend.calls.count("store") == 0
    assert rig.staging.used_bytes > 0
    copier(rig).stores.run()
    assert engine.drain_stores(SECONDS)
    assert rig.store_results() == {1: True}
    assert bytes(backend.objects[key(1, PACK)][HEADER_BYTES:]) == stored.numpy().tobytes()
    rig.all_leases_are_back()
    rig.load(item(1, block=3))
    copier(rig).let_go()
    assert rig.result().status == "loaded"
    assert torch.equal(rig.kv_cache[3], stored)


def test_a_later_object_waits_for_its_own_copy_too(rig: Rig) -> None:
    backend = rig.add_memory_tier()
    engine = rig.start()
    engine.submit_stores([item(1, block=1)])
    engine.submit_stores([item(2, block=2)])
    copier(rig).stores.run(1)
    rig.step_until(lambda: key(1, PACK) in backend.objects)
    assert key(2, PACK) not in backend.objects
    copier(rig).stores.run()
    assert engine.drain_stores(SECONDS)
    assert rig.store_results() == {1: True, 2: True}


def test_a_store_without_room_on_the_device_is_dropped_and_gives_its_memory_back(rig: Rig) -> None:
    rig.add_memory_tier()
    engine = rig.start()
    copier(rig).room = 1
    for _ in range(10):  # as long as the first copy goes on
        engine.submit_stores([item(1, block=1), item(2, block=2)])
    refused = [number_of(result) for result in engine.take_store_results() if not result.stored]
    assert refused == [2, *[1, 2] * 9]
    assert rig.counted("store_dropped") == len(refused)
    copier(rig).let_go()
    assert engine.drain_stores(SECONDS)
    assert rig.store_results() == {1: True}
    rig.all_leases_are_back()
    assert engine._stores.budget.held_bytes == 0, "the refused gathers count towards the limit of stores"


def test_a_full_device_buffer_drops_no_store_that_waits(rig: Rig) -> None:
    backend = rig.add_memory_tier(io_threads=1)
    engine = rig.start(staging_bytes=2 * 5 * LEASE)
    copier(rig).let_go()
    backend.gates["store"].shut()
    submit(rig, *range(5))  # two are in calls of the tier, three wait
    copier(rig).room = 0
    engine.submit_stores([item(5, block=5)])
    assert rig.store_results() == {5: False}
    assert rig.counted("store_dropped") == 1
    backend.gates["store"].open()
    assert engine.drain_stores(SECONDS)
    assert rig.store_results() == dict.fromkeys(range(5), True)


def test_a_load_has_its_verdict_when_its_blocks_are_written(rig: Rig) -> None:
    rig.add_memory_tier()
    engine = rig.start()
    have_stored(rig, 1, 2)
    before = rig.kv_cache.clone()
    job = rig.load(item(1, block=8), item(2, block=9))
    rig.step_until(lambda: copier(rig).loads.length == 2)
    assert engine.poll() == []
    assert engine.has_active_loads
    assert rig.staging.used_bytes > 0, "the copy reads the lease"
    assert torch.equal(rig.kv_cache, before)
    copier(rig).loads.run()
    assert [(result.job_id, result.status) for result in engine.poll()] == [(job, "loaded")]
    assert torch.equal(rig.kv_cache[8:10], before[1:3])
    assert rig.staging.used_bytes == 0


@pytest.mark.parametrize("end", ["timed out", "cancelled"])
def test_a_load_that_ends_during_its_copy_leaves_the_next_user_of_its_blocks_alone(rig: Rig, end: str) -> None:
    rig.add_memory_tier(load_timeout_seconds=0.05 if end == "timed out" else SECONDS)
    engine = rig.start()
    have_stored(rig, 1)
    job = rig.load(item(1, block=8))
    ended: dict[int, LoadResult] = {}
    rig.step_until(lambda: copier(rig).loads.length == 1 or not engine.has_active_loads, ended)
    if end == "cancelled":
        engine.cancel_load(job)
    rig.step_until(lambda: job in ended, ended)
    assert ended[job].status == end
    rig.kv_cache[8].random_()  # the block belongs to another request now
    expected = rig.kv_cache.clone()
    copier(rig).let_go()
    rig.all_leases_are_back()
    assert torch.equal(rig.kv_cache, expected)


def test_a_load_with_a_bad_object_fails_when_its_other_blocks_are_written(rig: Rig) -> None:
    backend = rig.add_memory_tier()
    engine = rig.start()
    have_stored(rig, 1, 2)
    stored = rig.kv_cache[1].clone()
    del backend.objects[key(2, PACK)]
    rig.load(item(1, block=8), item(2, block=9))
    rig.step_until(lambda: copier(rig).loads.length == 1)
    assert engine.poll() == []
    copier(rig).loads.run()
    result = rig.result()
    assert (result.status, result.failed_keys) == ("failed", (key(2, PACK),))
    assert torch.equal(rig.kv_cache[8], stored)
    rig.all_leases_are_back()


def test_the_lease_of_a_cancelled_load_is_free_when_its_copy_has_ended(rig: Rig) -> None:
    rig.add_memory_tier()
    engine = rig.start()
    have_stored(rig, 1)
    copier(rig).orders_engine = False
    job = rig.load(item(1, block=8))
    rig.step_until(lambda: copier(rig).loads.length == 1)
    engine.cancel_load(job)
    assert [result.status for result in engine.poll()] == ["cancelled"]
    assert rig.staging.used_bytes > 0, "the copy still reads it"
    copier(rig).loads.run()
    assert engine.poll() == []
    assert rig.staging.used_bytes == 0


def test_the_end_of_the_engine_waits_for_copies(rig: Rig) -> None:
    rig.add_memory_tier()
    engine = rig.start()
    have_stored(rig, 1)
    rig.load(item(1, block=8))
    rig.step_until(lambda: copier(rig).loads.length == 1)
    engine.submit_stores([item(2, block=2)])
    engine.close()
    assert copier(rig).loads.length == copier(rig).stores.length == 0
    rig.all_leases_are_back()
