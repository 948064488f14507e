"""Objects that a worker keeps at hand in a tier's memory after their load, for loads that cannot fail."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_core.runtime.io_loop import IoLoop
from offload_core.transfer.loads import LoadJob, LoadResult
from tests.core.transfer.test_lending import elsewhere, objects, store_lent, wait_for_replacement
from tests.support.lending_rig import LendingRig
from tests.support.transfer_rig import item

CAPACITY_OBJECTS = 16
JOB = 1000


@pytest.fixture(params=["off", "engine"])
def rig(request: pytest.FixtureRequest, io: IoLoop, tmp_path: Path) -> Iterator[LendingRig]:
    rig = LendingRig(io, tmp_path, request.param, capacity_objects=CAPACITY_OBJECTS)
    yield rig
    rig.close()


def load_and_keep(rig: LendingRig, stored: list[Any], job_id: int = JOB, block: int = 40) -> LoadResult:
    rig.engine.submit_load(LoadJob(job_id, "cpu", tuple(elsewhere(stored, block)), keep=True))
    result = rig.result()
    assert result.status == "loaded"
    return result


def expect_copied(rig: LendingRig, stored: list[Any], block: int = 50) -> None:
    """Copy kept objects, without a look at the tier, and compare the blocks with those that were stored."""
    rig.kv_cache[block : block + len(stored)] = 0
    rig.engine.copy_kept("cpu", elsewhere(stored, block))
    for place, one in enumerate(stored):
        assert torch.equal(rig.kv_cache[block + place], rig.kv_cache[one.blocks[0].block_ids[0]])


def has_room_for(rig: LendingRig, count: int) -> bool:
    """Return whether a tier has room for objects, also by eviction."""
    return store_lent(rig, objects(count, first=20))


def test_kept_objects_are_copied_at_once(rig: LendingRig) -> None:
    store_lent(rig, objects())
    assert load_and_keep(rig, objects()).kept
    calls = rig.counted("load_hits", "cpu", keep=True)
    for _ in range(3):
        expect_copied(rig, objects())
    expect_copied(rig, objects(2, first=3))
    assert rig.counted("load_hits", "cpu", keep=True) == calls
    assert rig.counted("load_kept", "cpu") == 3 * 8 + 2
    assert rig.pool.leases == 0


def test_the_tier_does_not_evict_kept_objects_until_they_are_given_back(rig: LendingRig) -> None:
    store_lent(rig, objects())
    load_and_keep(rig, objects())
    assert not has_room_for(rig, CAPACITY_OBJECTS)
    expect_copied(rig, objects())
    rig.engine.give_back([JOB, JOB + 1])
    rig.step_until(lambda: has_room_for(rig, CAPACITY_OBJECTS))
    with pytest.raises(KeyError):
        rig.engine.copy_kept("cpu", elsewhere(objects()))


def test_an_object_that_two_loads_keep_stays_until_both_are_given_back(rig: LendingRig) -> None:
    store_lent(rig, objects())
    load_and_keep(rig, objects(4))
    load_and_keep(rig, objects(4, first=2), JOB + 1)
    rig.engine.give_back([JOB])
    expect_copied(rig, objects(4, first=2))
    with pytest.raises(KeyError):
        rig.engine.copy_kept("cpu", elsewhere(objects(1)))
    rig.engine.give_back([JOB + 1])
    rig.step_until(lambda: has_room_for(rig, CAPACITY_OBJECTS))


def test_a_load_without_keep_or_with_a_missing_object_keeps_nothing(rig: LendingRig) -> None:
    store_lent(rig, objects())
    rig.load(*elsewhere(objects()), tier="cpu")
    assert not rig.result().kept
    rig.engine.submit_load(LoadJob(JOB, "cpu", (*elsewhere(objects()), item(99, 60)), keep=True))
    result = rig.result()
    assert result.status == "failed"
    assert not result.kept
    rig.step_until(lambda: has_room_for(rig, CAPACITY_OBJECTS))


def test_objects_that_came_through_staging_memory_are_not_kept(
    io: IoLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = {"name": "disk", "type": "disk", "path": str(tmp_path / "kv")}
    rig = LendingRig(io, tmp_path, "off", more=(disk,))
    try:
        store_lent(rig, objects())
        rig.engine.submit_load(LoadJob(JOB, "disk", tuple(elsewhere(objects())), keep=True))
        result = rig.result()
        assert result.status == "loaded"
        assert not result.kept
        rig.all_leases_are_back()
    finally:
        rig.close()


def test_a_cancelled_load_keeps_nothing(rig: LendingRig) -> None:
    store_lent(rig, objects(CAPACITY_OBJECTS))
    for job_id in range(JOB, JOB + 4):
        rig.engine.submit_load(LoadJob(job_id, "cpu", tuple(elsewhere(objects(CAPACITY_OBJECTS))), keep=True))
        rig.engine.cancel_load(job_id)
        assert not rig.result().kept
    rig.step_until(lambda: has_room_for(rig, CAPACITY_OBJECTS))


def test_kept_objects_outlive_the_io_process(io: IoLoop, tmp_path: Path) -> None:
    rig = LendingRig(io, tmp_path, "engine", capacity_objects=CAPACITY_OBJECTS)
    try:
        assert rig.processes is not None
        store_lent(rig, objects())
        load_and_keep(rig, objects())
        (process,) = rig.processes.all
        pid = process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        expect_copied(rig, objects())
        wait_for_replacement(rig, process, pid)
        rig.step_until(lambda: has_room_for(rig, CAPACITY_OBJECTS))  # the new process fills memory of its own
        expect_copied(rig, objects())
        rig.engine.give_back([JOB])
        rig.step_until(lambda: store_lent(rig, objects(CAPACITY_OBJECTS)))
    finally:
        rig.close()
