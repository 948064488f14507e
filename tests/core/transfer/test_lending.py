"""Objects in memory that a tier lends: one copy between the KV cache and the tier, and nothing lent for ever."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_backend_cpu import CpuBackend
from offload_backend_cpu.arena import Arena

from offload_core.api.backend import StoreOutcome
from offload_core.io_process.process import IoProcess
from offload_core.io_process.remote_storage import RemoteStorage
from offload_core.io_process.session import Session
from offload_core.memory.canonical import CanonicalKVCaches
from offload_core.runtime.io_loop import IoLoop
from offload_core.tiers.calls.lent_objects import LendingEnd
from offload_core.tiers.storage import LocalStorage
from tests.support.lending_rig import LendingRig
from tests.support.transfer_rig import SECONDS, WatchedCopier, WholeCopier, item

FIRST, LAST = 0, 8
CAPACITY_OBJECTS = 16


@pytest.fixture(params=["off", "engine"])
def rig(request: pytest.FixtureRequest, io: IoLoop, tmp_path: Path) -> Iterator[LendingRig]:
    rig = LendingRig(io, tmp_path, request.param, capacity_objects=CAPACITY_OBJECTS)
    yield rig
    rig.close()


@pytest.fixture
def local_rig(io: IoLoop, tmp_path: Path) -> Iterator[LendingRig]:
    rig = LendingRig(io, tmp_path, "off", capacity_objects=CAPACITY_OBJECTS)
    yield rig
    rig.close()


def objects(count: int = LAST - FIRST, first: int = FIRST) -> list[Any]:
    """Objects whose numbers are those of their blocks."""
    return [item(number, number) for number in range(first, first + count)]


def elsewhere(stored: list[Any], block: int = 40) -> list[Any]:
    """The same objects, to be loaded into other blocks."""
    return [item(int.from_bytes(one.key.chunk_hash, "big"), block + place) for place, one in enumerate(stored)]


def store_lent(rig: LendingRig, stored: list[Any]) -> bool:
    """Announce and store objects; return whether the tier has all of them."""
    rig.announce(*stored)
    results = rig.store_all(*stored)
    assert len(results) == len(stored), "an object has no result"
    return all(results.values())


def expect_loaded(rig: LendingRig, stored: list[Any], block: int = 40) -> None:
    wanted = [rig.kv_cache[one.blocks[0].block_ids[0]].clone() for one in stored]
    rig.kv_cache[block : block + len(stored)] = 0
    rig.load(*elsewhere(stored, block), tier="cpu")
    assert rig.result().status == "loaded"
    for place, content in enumerate(wanted):
        assert torch.equal(rig.kv_cache[block + place], content)


def test_an_object_is_copied_once_in_each_direction(rig: LendingRig, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[str] = []
    monkeypatch.setattr(Arena, "read", lambda *_: copies.append("read"))
    monkeypatch.setattr(Arena, "write", lambda *_: copies.append("write"))
    assert store_lent(rig, objects())
    expect_loaded(rig, objects())
    assert rig.pool.leases == 0, "staging memory is used"
    assert copies == [], "the tier has copied"


def test_an_object_that_was_not_announced_is_stored_from_staging_memory(rig: LendingRig) -> None:
    assert all(rig.store_all(*objects()).values())
    assert rig.pool.leases == LAST - FIRST
    expect_loaded(rig, objects())


def test_memory_that_nobody_fills_is_given_back(rig: LendingRig) -> None:
    for _ in range(3):
        rig.announce(*objects(CAPACITY_OBJECTS))
    rig.announce()
    stored = objects(CAPACITY_OBJECTS, first=20)
    assert store_lent(rig, stored), "some capacity is still reserved"
    expect_loaded(rig, stored)


def test_an_answer_that_comes_too_late_gives_its_memory_back(rig: LendingRig, monkeypatch: pytest.MonkeyPatch) -> None:
    lending = rig.tiers[0].lending
    start, answers = lending.start_reserve, queue.SimpleQueue[Callable[[], None]]()

    def start_and_hold_the_answer(wanted: Any, on_end: Callable[[LendingEnd[StoreOutcome] | None], None]) -> bool:
        return start(wanted, lambda end: answers.put(partial(on_end, end)))

    monkeypatch.setattr(lending, "start_reserve", start_and_hold_the_answer)
    rig.engine.announce_stores(objects())
    rig.step_until(lambda: not answers.empty())
    rig.engine.submit_stores(objects())
    answers.get()()
    assert rig.engine.drain_stores(SECONDS)
    assert set(rig.store_results().values()) == {True}
    monkeypatch.undo()
    stored = objects(CAPACITY_OBJECTS, first=20)
    assert store_lent(rig, stored), "some capacity is still reserved"
    expect_loaded(rig, stored)


def test_an_object_that_is_there_is_not_copied_again(rig: LendingRig) -> None:
    store_lent(rig, objects())
    rig.kv_cache[FIRST:LAST] += 1
    changed = rig.kv_cache[FIRST:LAST].clone()
    assert store_lent(rig, objects())
    rig.kv_cache[FIRST:LAST] -= 1
    expect_loaded(rig, objects())
    rig.kv_cache[FIRST:LAST] = changed
    assert rig.counted("store_already_present", "cpu") == LAST - FIRST


def test_older_objects_make_room(rig: LendingRig) -> None:
    for first in range(0, 32, 8):
        assert store_lent(rig, objects(8, first))
    expect_loaded(rig, objects(16, 16))
    rig.load(*elsewhere(objects(8)), tier="cpu")
    assert rig.result().status == "failed"


def test_a_cancelled_load_unpins_its_objects(rig: LendingRig) -> None:
    store_lent(rig, objects(CAPACITY_OBJECTS))
    for _ in range(5):
        rig.engine.cancel_load(rig.load(*elsewhere(objects(CAPACITY_OBJECTS)), tier="cpu"))
        assert rig.result().status == "cancelled"
    rig.step_until(lambda: store_lent(rig, objects(CAPACITY_OBJECTS, 20)))
    expect_loaded(rig, objects(CAPACITY_OBJECTS, 20))


def memory_of(rig: LendingRig) -> memoryview:
    """Return the memory that the tier lends, as this process has it."""
    storage = rig.tiers[0]._storage
    if isinstance(storage, RemoteStorage):
        assert storage._lent_memory is not None
        return storage._lent_memory.view
    assert isinstance(storage, LocalStorage)
    assert isinstance(storage.backend, CpuBackend)
    assert storage.backend._arena is not None
    return storage.backend._arena.view


@pytest.mark.parametrize("mode", ["off", "engine"])
@pytest.mark.parametrize(
    ("make_copier", "left"), [(WatchedCopier, 0), (WholeCopier, 1)], ids=["with its copy", "by the tier"]
)
@pytest.mark.parametrize("place", [100, -1], ids=["payload", "header"])
def test_a_damaged_object_is_found_and_deleted(
    io: IoLoop, tmp_path: Path, mode: str, make_copier: type[WatchedCopier], left: int, place: int
) -> None:
    """The load fails: its block is zero after a copy that has found the damage, and else untouched."""
    rig = LendingRig(io, tmp_path, mode, capacity_objects=CAPACITY_OBJECTS, make_copier=make_copier)
    try:
        store_lent(rig, objects())
        memory = memory_of(rig)
        memory[bytes(memory).index(rig.kv_cache[3].numpy().tobytes()) + place] ^= 1
        rig.kv_cache[40:48] = 1
        rig.load(*elsewhere(objects()), tier="cpu")
        result = rig.result()
        assert result.status == "failed"
        assert [int.from_bytes(key.chunk_hash, "big") for key in result.failed_keys] == [3]
        assert result.arrived_objects == 3
        assert torch.equal(rig.kv_cache[43], torch.full_like(rig.kv_cache[43], left))
        assert torch.equal(rig.kv_cache[44], rig.kv_cache[4])
        assert rig.counted("load_corrupt", "cpu") == 1
        rig.step_until(lambda: rig.io.submit(rig.tiers[0].check([objects()[3].key])).result(SECONDS) == [False])
        rig.load(*elsewhere(objects(1, 3)), tier="cpu")
        assert rig.result().status == "failed"
        assert rig.counted("load_missing", "cpu") == 1, "the damaged object is still there"
    finally:
        rig.close()


def test_objects_that_are_not_lent_are_loaded_as_usual(local_rig: LendingRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = local_rig
    lend = Arena.lent

    def lend_every_second(arena: Arena, runs: Any, nbytes: int) -> memoryview | None:
        return lend(arena, runs, nbytes) if runs[0][0] // runs[0][1] % 2 else None

    monkeypatch.setattr(Arena, "lent", lend_every_second)
    assert store_lent(rig, objects())
    expect_loaded(rig, objects())
    assert 0 < rig.pool.leases < 2 * (LAST - FIRST)
    rig.all_leases_are_back()


class _PinnedOnly(WatchedCopier):
    """A copier for a device, whose copies to pageable memory would wait."""

    takes_pageable_memory = False

    def __init__(self, caches: CanonicalKVCaches) -> None:
        super().__init__(caches)


def test_a_device_copies_to_pinned_staging_memory_only(io: IoLoop, tmp_path: Path) -> None:
    rig = LendingRig(io, tmp_path, "off", make_copier=_PinnedOnly)
    try:
        assert store_lent(rig, objects())
        expect_loaded(rig, objects())
        assert rig.pool.leases == 2 * (LAST - FIRST)
    finally:
        rig.close()


@pytest.mark.parametrize("mode", ["off", "engine"])
def test_an_object_that_two_tiers_take_is_in_staging_memory(io: IoLoop, tmp_path: Path, mode: str) -> None:
    second = {"name": "disk", "type": "disk", "path": str(tmp_path / "kv")}
    rig = LendingRig(io, tmp_path, mode, more=(second,))
    try:
        assert store_lent(rig, objects())
        assert rig.pool.leases == LAST - FIRST
        expect_loaded(rig, objects())
        rig.load(*elsewhere(objects()), tier="disk")
        assert rig.result().status == "loaded"
    finally:
        rig.close()


@pytest.mark.parametrize("mode", ["off", "engine"])
def test_a_loaded_object_in_lent_memory_reaches_a_slower_tier(io: IoLoop, tmp_path: Path, mode: str) -> None:
    second = {"name": "disk", "type": "disk", "path": str(tmp_path / "kv"), "write_policy": "second-touch"}
    rig = LendingRig(io, tmp_path, mode, more=(second,))
    try:
        assert store_lent(rig, objects())
        for block in (20, 30):
            expect_loaded(rig, objects(), block)
        assert rig.engine.drain_stores(SECONDS)
        rig.load(*elsewhere(objects()), tier="disk")
        assert rig.result().status == "loaded"
        for number in range(LAST):
            assert torch.equal(rig.kv_cache[40 + number], rig.kv_cache[number])
    finally:
        rig.close()


def wait_for_replacement(rig: LendingRig, process: IoProcess, old_pid: int) -> None:
    rig.step_until(lambda: process.pid not in (None, old_pid) and rig.tiers[0].lending.is_possible)


def test_a_killed_io_process_loses_objects_and_nothing_else(io: IoLoop, tmp_path: Path) -> None:
    rig = LendingRig(io, tmp_path, "engine")
    try:
        assert rig.processes is not None
        for first in (0, 8, 16):
            store_lent(rig, objects(8, first))
            rig.announce(*objects(4, first + 24))
            (process,) = rig.processes.all
            pid = process.pid
            assert pid is not None
            rig.load(*elsewhere(objects(8, first)), tier="cpu")
            os.kill(pid, signal.SIGKILL)
            rig.engine.submit_stores(objects(4, first + 24))  # their memory has lost its process
            assert rig.result().status in ("failed", "loaded")
            assert rig.engine.drain_stores(SECONDS)
            rig.store_results()
            wait_for_replacement(rig, process, pid)
        stored = objects(CAPACITY_OBJECTS)
        rig.step_until(lambda: store_lent(rig, stored))
        expect_loaded(rig, stored)
    finally:
        rig.close()


def test_memory_that_cannot_be_mapped_is_not_used(
    io: IoLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(_: Session, tier: int, label: str) -> None:
        raise OSError("no address space is left")

    monkeypatch.setattr(Session, "lent_memory", refuse)
    rig = LendingRig(io, tmp_path, "engine")
    try:
        assert store_lent(rig, objects())
        expect_loaded(rig, objects())
        assert rig.pool.leases == 2 * (LAST - FIRST)
        assert "tier 'cpu': its memory cannot be mapped" in caplog.text
        assert "no address space is left" in caplog.text
    finally:
        rig.close()


def test_memory_is_reserved_after_the_last_touch_which_sets_the_order_of_eviction(
    local_rig: LendingRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = local_rig
    store_lent(rig, objects(CAPACITY_OBJECTS))
    touch_may_go_on, touch = asyncio.Event(), rig.tiers[0].touch

    async def touch_later(keys: Any, spare: Any) -> None:
        await touch_may_go_on.wait()
        await touch(keys, spare)

    monkeypatch.setattr(rig.tiers[0], "touch", touch_later)
    oldest = objects(8)
    rig.engine.touch([one.key for one in oldest], [False] * len(oldest))
    rig.engine.announce_stores(objects(8, 20))
    io_loop_has_turned(rig)
    assert rig.counted("evictions", "cpu") == 0, "the touch has not come yet"
    rig.io.loop.call_soon_threadsafe(touch_may_go_on.set)
    rig.wait_for_answers(*objects(8, 20))
    assert set(rig.store_all(*objects(8, 20)).values()) == {True}
    expect_loaded(rig, oldest)


def io_loop_has_turned(rig: LendingRig) -> None:
    for _ in range(20):
        rig.io.submit(asyncio.sleep(0)).result(SECONDS)


def test_stores_that_fail_after_their_reservation_pause_the_tier(
    local_rig: LendingRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = local_rig

    def fail(*_: object) -> bool:
        raise OSError("the memory is gone")

    monkeypatch.setattr(Arena, "is_lent", fail)
    for first in range(30):
        if not rig.tiers[0].health.available:
            break
        assert not store_lent(rig, objects(1, first))
    assert not rig.tiers[0].health.available, "a reservation counts as a store that has worked"
