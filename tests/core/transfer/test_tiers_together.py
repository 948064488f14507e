"""Several tiers behind one transfer engine: write policies, promotions and shares (I3, I4)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from offload_core.memory.block_copier import BlockSlice
from offload_core.runtime.io_loop import IoLoop
from offload_core.tiers.accounting import TierAccounting
from offload_core.transfer.batches import TransferObject
from tests.support.memory_backend import MemoryBackend, key
from tests.support.transfer_rig import PACK, SECONDS, Rig, item

LEASE = 2 * 4096
"""Bytes of staging that an object of the rig takes."""


@pytest.fixture
def rig(io: IoLoop) -> Iterator[Rig]:
    rig = Rig(io)
    yield rig
    rig.finish()


def kept(backend: MemoryBackend) -> set[int]:
    return {int.from_bytes(name.chunk_hash, "big") for name in backend.objects}


def load(rig: Rig, *numbers: int, tier: str) -> None:
    """Load objects into block 15, and wait for their promotions."""
    rig.load(*(item(number, block=15) for number in numbers), tier=tier)
    assert rig.result().status == "loaded"
    assert rig.engine.drain_stores(SECONDS)


# Write policies


def test_each_tier_takes_what_its_policy_says(rig: Rig) -> None:
    every, second, never = (rig.add_memory_tier(name, write_policy=name) for name in ("every", "second-touch", "never"))
    rig.start()
    assert rig.store_all(item(1, block=1), item(2, block=2)) == {1: True, 2: True}
    assert (kept(every), kept(second), kept(never)) == ({1, 2}, set(), set())
    assert rig.store_all(item(1, block=1)) == {1: True}
    assert (kept(every), kept(second), kept(never)) == ({1, 2}, {1}, set())
    assert rig.counted("store_declined", "second-touch") == 2
    assert rig.counted("store_declined", "never") == 3
    assert rig.staging.used_bytes == 0


def test_an_object_that_every_tier_declines_is_not_copied_and_is_on_no_tier(rig: Rig) -> None:
    rig.add_memory_tier("second", write_policy="second-touch")
    rig.add_memory_tier("never", write_policy="never")
    engine = rig.start()
    engine.submit_stores([item(1, block=1)])
    assert rig.store_results() == {1: False}, "at once, since nothing is on its way"
    assert rig.copier.threads == set(), "not gathered"
    assert rig.store_all(item(1, block=1)) == {1: True}, "offered again it is taken"
    assert rig.copier.threads != set()


def test_a_dropped_store_counts_as_a_use(rig: Rig) -> None:
    backend = rig.add_memory_tier(write_policy="second-touch")
    engine = rig.start(staging_bytes=2 * LEASE)
    lease = rig.staging.try_acquire(LEASE, for_store=True)
    assert lease is not None
    for _ in range(2):
        engine.submit_stores([item(1, block=1)])
    assert (rig.counted("store_declined"), rig.counted("store_dropped")) == (1, 1)
    lease.release()
    rig.store_results()
    assert rig.store_all(item(1, block=1)) == {1: True}
    assert kept(backend) == {1}


# Promotions, and loads as uses


def test_a_loaded_object_is_promoted_to_every_faster_tier_that_allows_it(rig: Rig) -> None:
    policies: dict[str, dict[str, Any]] = {
        "first": {},
        "no": {"promote": False},
        "never": {"write_policy": "never"},
        "second": {},
    }
    tiers = {name: rig.add_memory_tier(name, **keys) for name, keys in policies.items()}
    source, slower = rig.add_memory_tier("source"), rig.add_memory_tier("slower")
    rig.start()
    rig.store_all(*(item(number, block=number) for number in range(3)))
    stored = dict(source.objects)
    for backend in (*tiers.values(), slower):
        backend.objects.clear()
    load(rig, 0, 1, 2, tier="source")
    assert tiers["first"].objects == tiers["second"].objects == stored
    assert (kept(tiers["no"]), kept(tiers["never"]), kept(slower)) == (set(), set(), set())
    assert rig.counted("promotions", "first") == rig.counted("promotions", "second") == 3
    assert source.calls.count("load_into") == 1, "no second read"
    assert rig.store_results() == {}, "nobody offered a store"
    assert rig.staging.used_bytes == rig.staging.store_bytes == 0
    source.objects.clear()
    rig.kv_cache[15].zero_()
    load(rig, 2, tier="first")
    assert torch.equal(rig.kv_cache[15], rig.kv_cache[2])


def test_a_load_is_a_use_for_faster_and_slower_tiers(rig: Rig) -> None:
    fast = rig.add_memory_tier("fast", write_policy="second-touch")
    still = rig.add_memory_tier("still", write_policy="second-touch", promote=False)
    source = rig.add_memory_tier("source")
    slow = rig.add_memory_tier("slow", write_policy="second-touch")
    rig.start()
    rig.store_all(item(1, block=1))
    assert [kept(backend) for backend in (fast, still, source, slow)] == [set(), set(), {1}, set()]
    load(rig, 1, tier="source")
    assert [kept(backend) for backend in (fast, still, source, slow)] == [{1}, set(), {1}, {1}]
    calls = len(slow.calls)
    load(rig, 1, tier="source")
    assert len(slow.calls) == calls, "what a tier is known to have is not offered to it with every load"
    rig.store_all(item(1, block=1))
    assert kept(still) == {1}


def test_a_promotion_delays_no_result_and_holds_its_lease_to_its_end(rig: Rig) -> None:
    fast = rig.add_memory_tier("fast")
    rig.add_memory_tier("slow")
    engine = rig.start()
    rig.store_all(item(1, block=1))
    fast.objects.clear()
    fast.gates["store"].shut()
    rig.load(item(1, block=15), tier="slow")
    assert rig.result().status == "loaded"
    fast.gates["store"].wait_for_a_call()
    assert rig.staging.used_bytes == rig.staging.store_bytes == LEASE
    assert rig.engine._shares["slow"].loads.held_bytes == 0
    assert not engine.drain_stores(0.01)
    fast.gates["store"].open()
    assert engine.drain_stores(SECONDS)
    assert rig.staging.used_bytes == 0
    assert kept(fast) == {1}


@pytest.mark.parametrize("when", ["cancelled", "late"])
def test_a_cancelled_load_is_not_promoted(rig: Rig, when: str) -> None:
    fast = rig.add_memory_tier("fast")
    slow = rig.add_memory_tier("slow", load_timeout_seconds=0.05 if when == "late" else SECONDS)
    engine = rig.start()
    rig.store_all(item(1, block=1))
    fast.objects.clear()
    slow.gates["load_into"].shut()
    job = rig.load(item(1, block=15), tier="slow")
    slow.gates["load_into"].wait_for_a_call()
    if when == "cancelled":
        engine.cancel_load(job)
    assert rig.result().status == ("cancelled" if when == "cancelled" else "timed out")
    slow.gates["load_into"].open()
    rig.all_leases_are_back()
    assert engine.drain_stores(SECONDS)
    assert kept(fast) == set()


def test_an_arrival_before_the_cancellation_of_its_load_is_not_promoted(rig: Rig) -> None:
    fast = rig.add_memory_tier("fast")
    rig.add_memory_tier("slow")
    engine = rig.start()
    rig.store_all(item(1, block=1))
    fast.objects.clear()
    job = rig.load(item(1, block=15), tier="slow")
    engine.wait_for_arrival(SECONDS)
    engine.cancel_load(job)
    assert rig.result().status == "cancelled"
    assert engine.drain_stores(SECONDS)
    assert kept(fast) == set()
    assert rig.staging.used_bytes == 0


def test_a_promotion_is_dropped_and_counted_if_the_stores_part_is_full(rig: Rig) -> None:
    fast = rig.add_memory_tier("fast")
    rig.add_memory_tier("slow")
    rig.start()
    rig.store_all(item(1, block=1))
    fast.objects.clear()
    full = []
    while (lease := rig.staging.try_acquire(1, for_store=True)) is not None:
        full.append(lease)
    load(rig, 1, tier="slow")
    assert (rig.counted("promotions", "fast"), rig.counted("promotions_dropped", "fast")) == (0, 1)
    for lease in full:
        lease.release()
    assert rig.staging.used_bytes == 0
    load(rig, 1, tier="slow")
    assert rig.counted("promotions", "fast") == 1


# Shares


def test_a_tier_at_its_share_drops_stores_for_itself_and_the_others_go_on(rig: Rig) -> None:
    hung = rig.add_memory_tier("hung", staging_share=0.5)
    well = rig.add_memory_tier("well", staging_share=1.0)
    rig.start(staging_bytes=16 * LEASE)  # stores may hold eight objects, the hung tier four of them
    hung.gates["store"].shut()
    for number in range(6):
        rig.engine.submit_stores([item(number, block=number)])
        rig.step_until(lambda number=number: number in kept(well))  # type: ignore[misc]  # the default binds
    results: dict[int, bool] = {}
    rig.step_until(lambda: bool(results.update(rig.store_results()) or len(results) == 6))
    assert results == dict.fromkeys(range(6), True), "the hung tier keeps no result back"
    assert rig.counted("store_dropped", "hung") == 2
    assert rig.counted("store_dropped", "well") == 0
    rig.step_until(lambda: rig.staging.used_bytes == 4 * LEASE)
    hung.gates["store"].open()
    assert rig.engine.drain_stores(SECONDS)
    assert rig.store_results() == {}, "one result each"
    assert kept(hung) == {0, 1, 2, 3}
    assert rig.staging.used_bytes == 0


def test_no_tier_has_it_only_when_all_have_ended(rig: Rig) -> None:
    slow = rig.add_memory_tier("slow")
    broken = rig.add_memory_tier("broken")
    rig.start()
    broken.faults = {"store": OSError("the medium is gone")}
    slow.faults = {"store": OSError("this one too")}
    slow.gates["store"].shut()
    rig.engine.submit_stores([item(1, block=1)])
    rig.step_until(lambda: rig.counted("store_failures", "broken") == 1)
    assert rig.store_results() == {}
    slow.gates["store"].open()
    assert rig.engine.drain_stores(SECONDS)
    assert rig.store_results() == {1: False}


def test_an_unexpected_error_in_one_tier_harms_no_other(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.add_memory_tier("odd")
    slow = rig.add_memory_tier("slow")
    rig.start()

    def raises(*_: object) -> bool:
        raise ZeroDivisionError("a defect of the core")

    monkeypatch.setattr(rig.tiers[0], "start_store", raises)
    slow.gates["store"].shut()
    rig.engine.submit_stores([item(1, block=1)])
    slow.gates["store"].wait_for_a_call()
    assert rig.staging.used_bytes == LEASE
    slow.gates["store"].open()
    assert rig.engine.drain_stores(SECONDS)
    assert rig.store_results() == {1: True}
    assert rig.staging.used_bytes == 0


@pytest.mark.parametrize("place", ["at the start", "at the end"])
def test_an_unexpected_error_in_one_call_of_a_load_harms_no_other(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    rig.add_memory_tier()
    rig.start()
    rig.store_all(*(item(number, block=number) for number in range(12)))
    owner, name = (rig.tiers[0], "start_load") if place == "at the start" else (TierAccounting, "loaded")
    whole = getattr(owner, name)

    def raises_for_the_first(*arguments: Any) -> Any:
        if any(isinstance(argument, list) and len(argument) == 8 for argument in arguments):
            raise ZeroDivisionError("a defect of the core")
        return whole(*arguments)

    monkeypatch.setattr(owner, name, raises_for_the_first)
    rig.load(*(item(number, block=15) for number in range(12)))
    result = rig.result()
    assert (result.status, set(result.failed_keys)) == ("failed", {key(number, PACK) for number in range(8)})
    rig.all_leases_are_back()


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_i4_hung_tiers_at_their_limits_stop_no_other_tiers_load(io: IoLoop, share: float) -> None:
    """Two of three tiers hang in loads, each with as much as it can get, and stores fill the rest of the pool."""
    rig = Rig(io, page_bytes=1 << 20, num_blocks=6)
    hung = [rig.add_memory_tier(name, staging_share=share, io_threads=8) for name in ("hung", "stuck")]
    well = rig.add_memory_tier("well", staging_share=0.5)
    rig.start()
    for number in range(4):
        assert rig.store_all(item(number, block=number)) == {number: True}
    for backend in hung:
        backend.gates["load_into"].shut()
    for name in ("hung", "stuck"):
        for _ in range(16):
            rig.load(*(item(number, block=5) for number in range(4)), tier=name)
    for backend in hung:
        backend.gates["load_into"].wait_for_a_call()
    leases = []
    while (lease := rig.staging.try_acquire(1 << 20, for_store=True)) is not None:
        leases.append(lease)
    for _ in range(2):
        rig.load(*(item(number, block=5) for number in range(4)), tier="well")
        assert rig.result().status == "loaded"
    assert well.calls.count("load_into") >= 2
    for lease in leases:
        lease.release()
    for backend in hung:
        backend.gates["load_into"].open()
    assert {result.status for result in rig.results(32).values()} == {"loaded"}
    assert rig.engine.drain_stores(SECONDS)
    rig.all_leases_are_back()
    rig.finish()


def test_an_object_loaded_for_blocks_that_are_held_already_is_promoted_too(rig: Rig) -> None:
    fast = rig.add_memory_tier("fast")
    rig.add_memory_tier("slow")
    rig.start()
    rig.store_all(item(1, block=1))
    fast.objects.clear()
    rig.load(TransferObject(key(1, PACK), (BlockSlice(1, ()),)), tier="slow")
    assert rig.result().status == "loaded"
    assert rig.engine.drain_stores(SECONDS)
    assert kept(fast) == {1}
