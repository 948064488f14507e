"""The ends of loads: at or before the deadline, complete or partial, and their effect on the tier's health."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from offload_core.api.backend import LoadOutcome
from offload_core.api.keys import ObjectKey
from offload_core.runtime.io_loop import IoLoop
from offload_core.transfer.jobs import JobState
from offload_core.transfer.loads import LoadJob
from tests.support.memory_backend import Gate, key
from tests.support.transfer_rig import PACK, Rig, item

BATCH = 8
NUMBERS = range(BATCH + 4)


@pytest.fixture
def rig(io: IoLoop) -> Iterator[Rig]:
    rig = Rig(io, num_blocks=32)
    yield rig
    rig.finish()


def test_a_load_that_times_out_tells_how_many_of_its_first_objects_are_in_their_blocks(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = rig.add_memory_tier(load_timeout_seconds=2, io_threads=2)
    rig.start()
    rig.store_all(*(item(number, block=number) for number in NUMBERS))
    gate, load_into = Gate(), backend.load_into

    async def second_batch_is_held(keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        if key(0, PACK) not in keys:
            await backend.run_blocking(gate.pass_through)
        return await load_into(keys, buffers)

    monkeypatch.setattr(backend, "load_into", second_batch_is_held)
    gate.shut()
    rig.load(*(item(number, block=16 + number) for number in NUMBERS))
    gate.wait_for_a_call()
    result = rig.result()
    assert (result.status, result.arrived_objects) == ("timed out", BATCH)
    assert result.failed_keys == tuple(key(number, PACK) for number in NUMBERS[BATCH:])
    assert torch.equal(rig.kv_cache[16 : 16 + BATCH], rig.kv_cache[:BATCH])
    gate.open()
    rig.all_leases_are_back()
    assert rig.counted("load_late") == len(NUMBERS) - BATCH


@pytest.mark.parametrize(("lost", "arrived"), [([2], 2), ([0], 0), ([3, 1], 1)])
def test_a_load_that_fails_counts_its_objects_up_to_the_first_gap(rig: Rig, lost: list[int], arrived: int) -> None:
    backend = rig.add_memory_tier()
    rig.start()
    rig.store_all(*(item(number, block=number) for number in range(4)))
    for number in lost:
        del backend.objects[key(number, PACK)]
    rig.load(*(item(number, block=16 + number) for number in range(4)))
    result = rig.result()
    assert (result.status, result.arrived_objects) == ("failed", arrived)
    assert set(result.failed_keys) == {key(number, PACK) for number in lost}


def test_a_load_that_the_tier_refuses_fails_at_once_and_no_object_is_mistrusted_for_that(rig: Rig) -> None:
    backend = rig.add_memory_tier(breaker_failures=1, breaker_pause_seconds=3600, breaker_max_pause_seconds=3600)
    engine = rig.start()
    rig.store_all(item(1, block=1))
    rig.tiers[0].health.timed_out("load", key(1, PACK))
    rig.load(item(1, block=3))
    (result,) = engine.poll()
    assert (result.status, result.failed_keys, result.arrived_objects) == ("failed", (), 0)
    assert engine.jobs.live == ()
    assert "load_into" not in backend.calls
    assert rig.counted("breaker_refused") == 1


@pytest.mark.parametrize("waited_seconds", [0.0, 0.01])
def test_the_tiers_health_counts_a_timeout_only_after_the_whole_deadline(rig: Rig, waited_seconds: float) -> None:
    backend = rig.add_memory_tier(load_timeout_seconds=0.05, breaker_failures=1, breaker_pause_seconds=3600)
    engine = rig.start()
    rig.store_all(item(1, block=1))
    backend.gates["load_into"].shut()
    engine.submit_load(LoadJob(1, "memory", (item(1, block=3),), waited_seconds))
    backend.gates["load_into"].wait_for_a_call()
    assert rig.result().status == "timed out"
    assert rig.tiers[0].health.admits("load") == bool(waited_seconds)
    assert rig.counted("load_timeouts") == 1, "either way"


def test_a_requests_earlier_waits_are_subtracted_from_the_deadline(rig: Rig) -> None:
    backend = rig.add_memory_tier(load_timeout_seconds=5)
    engine = rig.start()
    rig.store_all(item(1, block=1))
    backend.gates["load_into"].shut()
    engine.submit_load(LoadJob(1, "memory", (item(1, block=3),), waited_seconds=6))
    (result,) = engine.poll()
    assert (result.status, result.arrived_objects) == ("timed out", 0)


def test_a_load_that_ends_while_it_waits_for_memory_gives_it_back_and_is_never_asked_for(rig: Rig) -> None:
    backend = rig.add_memory_tier()
    engine = rig.start()
    rig.store_all(item(1, block=1))
    everything = rig.staging.try_acquire(rig.staging.capacity_bytes, for_store=False)
    assert everything is not None
    waiting = rig.load(item(1, block=3))
    (job,) = engine.jobs.live
    while job.state is not JobState.RUNNING:
        engine.wait_for_arrival(0.001)
    engine.cancel_load(waiting)
    assert rig.result().status == "cancelled"
    everything.release()
    rig.load(item(1, block=4))  # its turn comes after the other's
    assert rig.result().status == "loaded"
    assert backend.calls.count("load_into") == 1
    rig.all_leases_are_back()
