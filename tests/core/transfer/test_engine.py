"""Loads and stores: right bytes, in time or not at all (I1 to I3, I5)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offload_core.memory.block_copier import BlockSlice
from offload_core.runtime.io_loop import IoLoop
from offload_core.transfer.batches import TransferObject
from tests.support.damage import flipped
from tests.support.memory_backend import key
from tests.support.transfer_rig import PACK, SECONDS, Rig, disk_tier, item


@pytest.fixture
def rig(io: IoLoop) -> Iterator[Rig]:
    rig = Rig(io)
    yield rig
    rig.finish()


@pytest.mark.parametrize("source", ["ram", "nvme"])
def test_stored_blocks_are_loaded_into_other_blocks_and_nothing_else_changes(
    rig: Rig, tmp_path: Path, source: str
) -> None:
    ram = rig.add_memory_tier("ram")
    rig.add_tier(disk_tier("nvme", str(tmp_path)))
    engine = rig.start()
    stored = rig.kv_cache.clone()
    assert rig.store_all(*(item(number, block=number) for number in range(8))) == dict.fromkeys(range(8), True)
    assert rig.staging.used_bytes == 0
    assert len(ram.objects) == len(list(tmp_path.rglob("*.kv"))) == 8
    rig.kv_cache.random_()
    expected = rig.kv_cache.clone()
    expected[9:15] = stored[[3, 1, 7, 0, 2, 5]]
    job = rig.load(*(item(number, block=9 + i) for i, number in enumerate([3, 1, 7, 0, 2, 5])), tier=source)
    assert engine.has_active_loads
    result = rig.result()
    assert (result.job_id, result.status, result.failed_keys) == (job, "loaded", ())
    assert torch.equal(rig.kv_cache, expected)
    assert not rig.engine.has_active_loads
    rig.all_leases_are_back()


def test_a_load_without_objects_ends_at_once(rig: Rig) -> None:
    rig.add_memory_tier()
    engine = rig.start()
    rig.load()
    assert [result.status for result in engine.poll()] == ["loaded"]
    assert engine.poll() == []


def test_a_load_of_blocks_that_are_held_already_leaves_them_alone(rig: Rig) -> None:
    rig.add_memory_tier()
    rig.start()
    rig.store_all(item(1, block=1))
    before = rig.kv_cache.clone()
    rig.load(TransferObject(key(1, PACK), (BlockSlice(1, ()),)))
    assert rig.result().status == "loaded"
    assert torch.equal(rig.kv_cache, before)


def test_i2_i3_a_late_load_writes_nothing_and_holds_its_lease_until_its_call_has_ended(rig: Rig) -> None:
    backend = rig.add_memory_tier(load_timeout_seconds=0.05)
    engine = rig.start()
    rig.store_all(item(1, block=1), item(2, block=2))
    gate = backend.gates["load_into"]
    gate.shut()
    rig.load(item(1, block=3), item(2, block=4))
    gate.wait_for_a_call()
    result = rig.result()
    assert (result.status, result.failed_keys) == ("timed out", (key(1, PACK), key(2, PACK)))
    assert rig.counted("load_timeouts") == 1
    assert not engine.has_active_loads
    held = rig.staging.used_bytes
    assert held > 0, "timed out is not ended: the backend may still write"
    rig.kv_cache.random_()  # the blocks belong to another request now
    expected = rig.kv_cache.clone()
    assert engine.poll() == []
    assert rig.staging.used_bytes == held
    gate.open()
    rig.all_leases_are_back()
    assert torch.equal(rig.kv_cache, expected)
    assert rig.counted("load_late") == 2
    rig.tiers[0].limits = rig.tiers[0].limits.model_copy(update={"load_timeout_seconds": SECONDS})
    rig.load(item(1, block=3))
    assert rig.result().status == "loaded", "the tier works again"


def test_i2_i3_a_cancelled_load_writes_nothing_and_holds_its_lease_until_its_call_has_ended(rig: Rig) -> None:
    backend = rig.add_memory_tier()
    engine = rig.start()
    rig.store_all(item(1, block=1))
    gate = backend.gates["load_into"]
    gate.shut()
    job = rig.load(item(1, block=3))
    gate.wait_for_a_call()
    engine.cancel_load(job)
    (result,) = engine.poll()
    assert (result.job_id, result.status, result.failed_keys) == (job, "cancelled", ())
    held = rig.staging.used_bytes
    assert held > 0
    expected = rig.kv_cache.clone()
    gate.open()
    rig.all_leases_are_back()
    assert torch.equal(rig.kv_cache, expected)
    assert rig.counted("load_late") == 1


def test_i2_an_object_that_arrived_before_the_cancellation_is_not_copied_after_it(rig: Rig) -> None:
    rig.add_memory_tier()
    engine = rig.start()
    rig.store_all(item(1, block=1))
    expected = rig.kv_cache.clone()
    job = rig.load(item(1, block=3))
    engine.wait_for_arrival(SECONDS)  # it is there and verified; the engine has not polled yet
    engine.cancel_load(job)
    assert [result.status for result in engine.poll()] == ["cancelled"]
    assert torch.equal(rig.kv_cache, expected)
    rig.all_leases_are_back()


def test_a_load_cancelled_before_its_turn_is_never_asked_for(rig: Rig) -> None:
    backend = rig.add_memory_tier(io_threads=1)
    engine = rig.start()
    rig.store_all(item(1, block=1))
    gate = backend.gates["load_into"]
    gate.shut()
    for block in (3, 4):  # they hold both of the tier's load slots
        rig.load(item(1, block=block))
    gate.wait_for_a_call()
    cancelled = rig.load(item(1, block=5))
    engine.cancel_load(cancelled)
    assert [result.job_id for result in engine.poll()] == [cancelled]
    rig.load(item(1, block=6))  # comes after the cancelled one
    gate.open()
    assert {result.status for result in rig.results(3).values()} == {"loaded"}
    assert backend.calls.count("load_into") == 3


def test_cancelling_an_ended_or_unknown_load_is_harmless(rig: Rig) -> None:
    rig.add_memory_tier()
    engine = rig.start()
    job = rig.load()
    assert len(engine.poll()) == 1
    engine.cancel_load(job)
    engine.cancel_load(999)
    assert engine.poll() == []


@pytest.mark.parametrize("fault", ["missing", "damaged", "of another key", "the backend raises"])
def test_i5_a_load_with_one_bad_object_fails_once_and_names_the_bad_key(rig: Rig, fault: str) -> None:
    backend = rig.add_memory_tier()
    engine = rig.start()
    rig.store_all(*(item(number, block=number) for number in range(3)))
    bad = key(1, PACK)
    if fault == "missing":
        del backend.objects[bad]
    elif fault == "damaged":
        backend.objects[bad] = backend.objects[bad][:-1] + bytes([backend.objects[bad][-1] ^ 1])
    elif fault == "of another key":
        backend.objects[bad] = backend.objects[key(2, PACK)]
    else:
        backend.faults = {"load_into": OSError("the medium is gone")}
    rig.load(*(item(number, block=10 + number) for number in range(3)))
    result = rig.result()
    assert result.status == "failed"
    assert bad in result.failed_keys or fault == "the backend raises"
    assert set(result.failed_keys) <= {bad} or fault == "the backend raises"
    assert result.failed_keys
    rig.all_leases_are_back()
    assert engine.poll() == []


def test_i5_a_bad_object_never_reaches_its_block(rig: Rig) -> None:
    backend = rig.add_memory_tier()
    rig.start()
    rig.store_all(item(1, block=1))
    backend.objects[key(1, PACK)] = flipped(backend.objects[key(1, PACK)])
    expected = rig.kv_cache.clone()
    rig.load(item(1, block=3))
    assert rig.result().status == "failed"
    assert torch.equal(rig.kv_cache, expected)
    assert rig.counted("load_corrupt") == 1


def test_a_store_holds_what_the_block_was_when_it_was_submitted(rig: Rig) -> None:
    backend = rig.add_memory_tier()
    engine = rig.start()
    before = rig.kv_cache[1].clone()
    backend.gates["store"].shut()
    engine.submit_stores([item(1, block=1)])
    rig.kv_cache[1].random_()  # the engine reuses the block while the store is on its way
    backend.gates["store"].open()
    assert engine.drain_stores(SECONDS)
    rig.load(item(1, block=2))
    assert rig.result().status == "loaded"
    assert torch.equal(rig.kv_cache[2], before)


def test_closing_cancels_loads_and_reports_nothing_more(rig: Rig) -> None:
    backend = rig.add_memory_tier()
    engine = rig.start()
    rig.store_all(item(1, block=1))
    backend.gates["load_into"].shut()
    rig.load(item(1, block=3))
    backend.gates["load_into"].wait_for_a_call()
    expected = rig.kv_cache.clone()
    engine.close()
    assert not engine.has_active_loads
    backend.gates["load_into"].open()
    rig.all_leases_are_back()
    assert torch.equal(rig.kv_cache, expected)
