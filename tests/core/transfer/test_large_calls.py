"""Calls of several batches on remote media: fewer round trips, with the deadlines and the memory of small calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import pytest
import torch

from offload_core.api.backend import StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.memory.staging_pool import Lease
from offload_core.runtime.io_loop import IoLoop
from offload_core.transfer import call_size
from tests.support.memory_backend import MemoryBackend, key
from tests.support.transfer_rig import PACK, SECONDS, Rig, item

MIB = 1024 * 1024
POOL_BYTES = 128 * MIB
LATE = 0.6
"""A deadline in seconds before which calls begin, on a busy machine too."""


@pytest.fixture(autouse=True)
def all_calls_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_size, "QUICK_SECONDS", 1e9)


@pytest.fixture
def rig(io: IoLoop) -> Iterator[Rig]:
    """Return a rig in which two objects are a batch."""
    rig = Rig(io, page_bytes=MIB, num_blocks=32)
    yield rig
    rig.finish()


def objects(count: int) -> list[int]:
    return list(range(count))


def store(rig: Rig, count: int) -> None:
    rig.engine.submit_stores([item(number, block=number) for number in objects(count)])


def all_wait(rig: Rig, count: int) -> None:
    """Wait until so many objects wait for a slot of their tier."""
    (writer,) = rig.engine._stores._writers
    rig.step_until(lambda: len(list(writer.waiting())) >= count)


def stored_behind_a_gate(rig: Rig, backend: MemoryBackend, count: int) -> list[int]:
    """Store objects that all wait for the first calls. Return the number of objects in each call."""
    backend.gates["store"].shut()
    store(rig, count)
    all_wait(rig, count - 4)
    backend.gates["store"].open()
    assert rig.engine.drain_stores(SECONDS)
    assert rig.store_results() == dict.fromkeys(objects(count), True)
    return backend.call_objects["store"]


def load(rig: Rig, count: int, tier: str = "memory") -> None:
    """Load objects into the upper half of the blocks, and check their bytes."""
    rig.kv_cache[16:] = 0
    rig.load(*(item(number, block=16 + number) for number in objects(count)), tier=tier)
    assert rig.result().status == "loaded"
    assert torch.equal(rig.kv_cache[16 : 16 + count], rig.kv_cache[:count])


def test_a_store_call_on_a_remote_medium_takes_batches_that_wait(rig: Rig) -> None:
    backend = rig.add_memory_tier(medium="remote", io_threads=1)
    rig.start(POOL_BYTES)
    sizes = stored_behind_a_gate(rig, backend, 28)
    assert sizes[:2] == [2, 2], "the first calls have nothing to wait for"
    assert max(sizes) >= 8
    assert sum(sizes) == len(backend.objects) == 28
    rig.all_leases_are_back()


def test_every_object_of_a_large_call_has_its_own_result(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = rig.add_memory_tier(medium="remote", io_threads=1)
    rig.start(POOL_BYTES)
    stored_behind_a_gate(rig, backend, 28)
    backend.objects.clear()
    rejected = {key(number, PACK) for number in (3, 8, 13)}
    whole = backend.store

    async def store_some(keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        await whole(keys, buffers)
        return [StoreOutcome.REJECTED if one in rejected else StoreOutcome.STORED for one in keys]

    monkeypatch.setattr(backend, "store", store_some)
    backend.call_objects["store"].clear()
    backend.gates["store"].shut()
    store(rig, 16)
    all_wait(rig, 12)
    backend.gates["store"].open()
    assert rig.engine.drain_stores(SECONDS)
    assert rig.store_results() == {number: key(number, PACK) not in rejected for number in objects(16)}
    assert max(backend.call_objects["store"]) > 2


@pytest.mark.parametrize("medium", ["host", "disk"])
def test_calls_on_the_media_of_one_host_stay_small(rig: Rig, medium: Literal["host", "disk"]) -> None:
    backend = rig.add_memory_tier(medium=medium, io_threads=1)
    rig.start(POOL_BYTES)
    assert stored_behind_a_gate(rig, backend, 16) == [2] * 8
    for _ in range(4):
        load(rig, 16)
    assert set(backend.call_objects["load_into"]) == {2}


def test_a_slow_medium_gets_small_calls(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_size, "QUICK_SECONDS", -1.0)
    backend = rig.add_memory_tier(medium="remote", io_threads=1)
    rig.start(POOL_BYTES)
    assert stored_behind_a_gate(rig, backend, 16) == [2] * 8
    for _ in range(4):
        load(rig, 16)
    assert set(backend.call_objects["load_into"]) == {2}


def test_loads_grow_and_a_short_load_is_spread_over_all_slots(rig: Rig) -> None:
    backend = rig.add_memory_tier(medium="remote", io_threads=1)
    rig.start(POOL_BYTES)
    rig.store_all(*(item(number, block=number) for number in objects(16)))
    for _ in range(4):
        load(rig, 16)
    backend.call_objects["load_into"].clear()
    load(rig, 16)
    assert backend.call_objects["load_into"] == [8, 8], "as many calls as the tier has slots"
    backend.call_objects["load_into"].clear()
    load(rig, 4)
    assert backend.call_objects["load_into"] == [2, 2]


def test_a_missing_object_fails_alone_and_a_broken_call_fails_whole(rig: Rig) -> None:
    backend = rig.add_memory_tier(medium="remote", io_threads=1)
    rig.start(POOL_BYTES)
    rig.store_all(*(item(number, block=number) for number in objects(16)))
    for _ in range(4):
        load(rig, 16)
    del backend.objects[key(0, PACK)]
    job = rig.load(*(item(number, block=16 + number) for number in objects(16)))
    result = rig.result()
    assert (result.job_id, result.status, result.failed_keys) == (job, "failed", (key(0, PACK),)), "others are hits"
    backend.faults = {"load_into": OSError("gone")}
    rig.load(*(item(number, block=16 + number) for number in objects(16)))
    assert len(rig.result().failed_keys) == 16
    rig.all_leases_are_back()


def fill(rig: Rig, free_bytes: int) -> list[Lease]:
    """Lease the common part of the pool, except the last ``free_bytes``."""
    leases = []
    while (lease := rig.staging.try_acquire(MIB, for_store=False)) is not None:
        leases.append(lease)
    for lease in leases[: -(-free_bytes // MIB)]:
        lease.release()
    return leases[-(-free_bytes // MIB) :]


def grown_loads(rig: Rig, *tiers: str) -> None:
    rig.store_all(*(item(number, block=number) for number in objects(16)))
    for tier in tiers:
        for _ in range(4):
            load(rig, 16, tier)


def test_i4_a_large_load_goes_through_what_is_left_of_a_pool(rig: Rig) -> None:
    backend = rig.add_memory_tier(medium="remote", io_threads=1)
    rig.start(POOL_BYTES)
    grown_loads(rig, "memory")
    held = fill(rig, 4 * MIB)
    backend.call_objects["load_into"].clear()
    load(rig, 16)
    assert max(backend.call_objects["load_into"]) < 8, "there was no memory for a large call"
    for lease in held:
        lease.release()
    load(rig, 16)
    assert backend.call_objects["load_into"][-2:] == [8, 8]


def test_i4_a_large_load_needs_no_memory_but_its_tiers_private_piece(rig: Rig) -> None:
    for name in ("one", "other"):
        rig.add_memory_tier(name, medium="remote", io_threads=1)
    rig.start(2 * POOL_BYTES)
    grown_loads(rig, "one", "other")
    held = fill(rig, 0)
    for tier in ("one", "other"):
        load(rig, 16, tier)
    for lease in held:
        lease.release()
    rig.all_leases_are_back()


@pytest.mark.parametrize("tiers", [1, 2])
def test_i4_the_smallest_pool_is_as_small_for_remote_media(rig: Rig, tiers: int) -> None:
    for number in range(tiers):
        rig.add_memory_tier(f"tier{number}", medium="remote")
    rig.start()
    for number in objects(16):
        assert rig.store_all(item(number, block=number)) == {number: True}
    for tier in rig.tiers:
        for _ in range(3):
            load(rig, 16, tier.name)
    rig.all_leases_are_back()


def test_i3_every_batch_of_a_late_call_has_its_result_and_keeps_its_memory(rig: Rig) -> None:
    seconds = 5 * LATE  # 28 MiB are stored in time first
    backend = rig.add_memory_tier(medium="remote", io_threads=1, store_timeout_seconds=seconds)
    rig.start(POOL_BYTES)
    stored_behind_a_gate(rig, backend, 28)
    backend.objects.clear()
    backend.call_objects["store"].clear()
    backend.gates["store"].shut()
    store(rig, 12)
    results: dict[int, bool] = {}
    rig.step_until(lambda: bool(results.update(rig.store_results()) or len(results) == 12))
    assert set(results.values()) == {False}
    begun = sum(backend.call_objects["store"])
    rig.step_until(lambda: rig.staging.used_bytes == begun * (MIB + 4096))
    backend.gates["store"].open()
    assert rig.engine.drain_stores(SECONDS)
    assert rig.store_results() == {}, "one result each"
    assert rig.counted("store_late") == len(backend.objects) == begun
    assert rig.staging.used_bytes == 0
