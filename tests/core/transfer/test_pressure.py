"""Little staging memory, hung tiers and many jobs: nothing waits for ever and nothing is lost unnoticed (I3, I4)."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterator

import pytest
import torch

from offload_core.memory.block_copier import BlockSlice
from offload_core.memory.staging_pool import Lease
from offload_core.memory.staging_size import smallest_pool_bytes, staging_problem
from offload_core.objects.format import object_bytes
from offload_core.runtime.io_loop import IoLoop
from offload_core.transfer.batches import TransferObject
from tests.support.memory_backend import key
from tests.support.transfer_rig import PACK, SECONDS, Rig, WholeCopier, item

MIB = 1024 * 1024


@pytest.fixture
def make(io: IoLoop) -> Iterator[Callable[[int, int], Rig]]:
    rigs: list[Rig] = []

    def make_rig(page_bytes: int, num_blocks: int) -> Rig:
        rigs.append(Rig(io, page_bytes=page_bytes, num_blocks=num_blocks))
        return rigs[-1]

    yield make_rig
    for rig in rigs:
        rig.finish()


@pytest.fixture
def rig(make: Callable[[int, int], Rig]) -> Rig:
    return make(512, 16)


def test_stores_without_free_staging_are_dropped_counted_and_reported(rig: Rig) -> None:
    backends = [rig.add_memory_tier(name, staging_share=1.0) for name in ("memory", "other")]
    engine = rig.start(staging_bytes=8 * 2 * 4096)  # eight objects, of which stores may hold four
    for backend in backends:
        backend.gates["store"].shut()
    engine.submit_stores([item(number, block=number) for number in range(6)])
    assert rig.store_results() == {4: False, 5: False}
    assert rig.counted("store_dropped") == rig.counted("store_dropped", "other") == 2
    for backend in backends:
        backend.gates["store"].open()
    assert engine.drain_stores(SECONDS)
    assert rig.store_results() == dict.fromkeys(range(4), True)
    assert rig.staging.used_bytes == 0
    assert rig.store_all(item(4, block=4)) == {4: True}, "there is room again"


def test_draining_waits_only_as_long_as_it_may(rig: Rig) -> None:
    backend = rig.add_memory_tier()
    engine = rig.start()
    assert engine.drain_stores(0)
    backend.gates["store"].shut()
    engine.submit_stores([item(1, block=1)])
    backend.gates["store"].wait_for_a_call()
    assert not engine.drain_stores(0.01)
    assert engine.take_store_results() == []
    backend.gates["store"].open()
    assert engine.drain_stores(SECONDS)
    assert rig.store_results() == {1: True}


def test_i3_a_stores_lease_is_held_until_the_last_tier_has_ended(rig: Rig) -> None:
    fast, slow = rig.add_memory_tier("fast"), rig.add_memory_tier("slow")
    engine = rig.start()
    slow.gates["store"].shut()
    engine.submit_stores([item(1, block=1)])
    slow.gates["store"].wait_for_a_call()
    results: dict[int, bool] = {}
    rig.step_until(lambda: bool(results.update(rig.store_results()) or results))
    assert results == {1: True}, "known as soon as one tier has it"
    assert rig.staging.used_bytes > 0
    slow.gates["store"].open()
    assert engine.drain_stores(SECONDS)
    assert rig.store_results() == {}
    assert rig.staging.used_bytes == 0
    assert fast.objects == slow.objects


@pytest.mark.parametrize("broken", [("fast",), ("slow",), ("fast", "slow")], ids="+".join)
def test_a_store_is_stored_when_any_tier_has_it(rig: Rig, broken: tuple[str, ...]) -> None:
    for name in ("fast", "slow"):
        backend = rig.add_memory_tier(name)
        if name in broken:
            backend.faults = {"store": OSError("the medium is gone")}
    rig.start()
    assert rig.store_all(item(1, block=1), item(2, block=2)) == dict.fromkeys((1, 2), len(broken) < 2)
    assert rig.staging.used_bytes == 0


def test_i4_a_hung_tier_holds_up_no_other_tiers_loads(rig: Rig) -> None:
    hung = rig.add_memory_tier("hung", io_threads=2)
    rig.add_memory_tier("well")
    engine = rig.start()
    rig.store_all(item(1, block=1))
    hung.gates["load_into"].shut()
    waiting = [rig.load(item(1, block=2 + i), tier="hung") for i in range(8)]
    hung.gates["load_into"].wait_for_a_call()
    loaded = rig.load(item(1, block=15), tier="well")
    assert rig.result().job_id == loaded
    assert torch.equal(rig.kv_cache[15], rig.kv_cache[1])
    assert engine.has_active_loads
    hung.gates["load_into"].open()
    assert {job: result.status for job, result in rig.results(8).items()} == dict.fromkeys(waiting, "loaded")


def test_jobs_with_more_bytes_than_the_pool_do_not_wait_for_each_other(make: Callable[[int, int], Rig]) -> None:
    # Forty-eight batches of two objects, up to 32 at once, in a pool of about two: an object for each would help none.
    rig = make(MIB, 32)
    rig.add_memory_tier(io_threads=16)
    engine = rig.start()
    assert 4 * MIB < rig.staging.capacity_bytes < 8 * MIB
    for number in range(16):
        assert rig.store_all(item(number, block=number)) == {number: True}
    stored = rig.kv_cache[:16].clone()
    for _ in range(6):  # each fills the same blocks with the same objects
        rig.load(*(item(number, block=16 + number) for number in range(16)))
    assert {result.status for result in rig.results(6).values()} == {"loaded"}
    assert torch.equal(rig.kv_cache[16:], stored)
    assert rig.staging.used_bytes == 0
    assert engine.poll() == []


@pytest.mark.parametrize("payload_bytes", [1_198_372, 1_198_373, 8 * MIB, 100_000])
def test_i4_the_smallest_pool_has_room_for_a_batch_beside_hung_stores(
    make: Callable[[int, int], Rig], payload_bytes: int
) -> None:
    # 1,198,372 bytes: seven are a little less than 8 MiB, so a batch has eight, each with a header and rounded up.
    rig = make(payload_bytes, 3)
    rig.add_memory_tier()
    rig.start()
    for number in range(8):
        assert rig.store_all(item(number, block=number % 3)) == {number: True}
    hung: list[Lease] = []
    while (lease := rig.staging.try_acquire(1, for_store=True)) is not None:
        hung.append(lease)
    rig.load(*(item(number, block=number % 3) for number in range(8)))
    assert rig.result().status == "loaded"
    for lease in hung:
        lease.release()


def test_the_smallest_pool_grows_with_the_largest_object(rig: Rig) -> None:
    small = smallest_pool_bytes(rig.largest_payload_bytes)
    large = Rig(rig.io, page_bytes=5 * MIB, num_blocks=1)
    assert smallest_pool_bytes(large.largest_payload_bytes) - small >= 2 * 4 * MIB
    assert small >= 2 * object_bytes(512)


def test_a_pool_that_is_too_small_is_a_problem_with_a_size_that_works() -> None:
    problem = staging_problem(MIB, 5 * MIB, 256)
    assert problem is not None
    assert problem.startswith("staging_bytes: 1048576 is too small for this model's objects of up to 5242880 bytes")
    assert problem.endswith("or choose a smaller hybrid_chunk_size than 256")
    (enough,) = re.findall(r"set it to (\d+) or more", problem)
    assert staging_problem(int(enough), 5 * MIB, 256) is None
    assert staging_problem(int(enough) - 1, 5 * MIB, 256) is not None


def test_a_batch_that_cannot_be_sealed_gives_its_memory_back_is_reported_and_harms_no_other(
    io: IoLoop, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(io, make_copier=WholeCopier)
    rig.add_memory_tier()
    engine = rig.start()
    bad = TransferObject(key(1, PACK)._replace(chunk_hash=bytes(65)), (BlockSlice(0, (1,)),))
    engine.submit_stores([bad, *(item(number, block=number) for number in range(2, 14))])
    assert engine.drain_stores(SECONDS)
    assert rig.staging.used_bytes == 0
    assert rig.store_results() == {0: False, **dict.fromkeys(range(2, 9), False), **dict.fromkeys(range(9, 14), True)}
    rig.io.submit(asyncio.sleep(0)).result(SECONDS)  # the error is logged on the loop, by then
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "unexpected error" in caplog.text
    assert rig.store_all(item(1, block=1)) == {1: True}
    rig.finish()


def test_i3_a_tier_that_cancels_its_own_store_does_not_take_the_memory_from_another(rig: Rig) -> None:
    odd, slow = rig.add_memory_tier("odd"), rig.add_memory_tier("slow")
    engine = rig.start()
    odd.faults = {"store": asyncio.CancelledError()}
    slow.gates["store"].shut()
    engine.submit_stores([item(1, block=1)])
    slow.gates["store"].wait_for_a_call()
    rig.step_until(lambda: "store" in odd.calls)
    assert not engine.drain_stores(0.05)
    assert rig.staging.used_bytes > 0
    slow.gates["store"].open()
    assert engine.drain_stores(SECONDS)
    assert rig.store_results() == {1: True}
