"""Lent memory and a device: its copies use the memory once that is pinned, and it stays lent until they have ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from offload_core.runtime.io_loop import IoLoop
from offload_core.tiers.calls.lent_objects import LentObject
from tests.core.transfer.test_kept_objects import JOB, load_and_keep
from tests.core.transfer.test_lending import elsewhere, expect_loaded, objects, store_lent
from tests.support.held_copier import HeldCopier, copier
from tests.support.lending_rig import LendingRig
from tests.support.recorded_pinning import RecordedPinning
from tests.support.transfer_rig import SECONDS

COUNT = 8
NewRig = Callable[..., LendingRig]


class DeviceCopier(HeldCopier):
    takes_pageable_memory = False
    takes_pinned_pieces = True


@pytest.fixture
def new_rig(io: IoLoop, tmp_path: Path) -> Iterator[NewRig]:
    rigs: list[LendingRig] = []

    def new(pinning: RecordedPinning | None, mode: str = "engine") -> LendingRig:
        rig = LendingRig(
            io, tmp_path, mode, capacity_objects=2 * COUNT, pinning=pinning,
            make_copier=lambda caches: DeviceCopier(caches, room=COUNT),
        )  # fmt: skip
        rigs.append(rig)
        copier(rig).let_go()
        return rig

    yield new
    for rig in rigs:
        copier(rig).let_go()
        rig.close()


@pytest.fixture
def rig(new_rig: NewRig) -> LendingRig:
    """A rig whose tier has pinned its memory."""
    rig = new_rig(RecordedPinning())
    rig.step_until(lambda: rig.tiers[0].lending.is_possible)
    return rig


def test_objects_are_copied_between_the_device_and_lent_memory(rig: LendingRig) -> None:
    assert store_lent(rig, objects())
    expect_loaded(rig, objects())
    assert rig.pool.leases == 0, "staging memory is used"
    assert rig.counted("store_lent", "cpu") == rig.counted("load_lent", "cpu") == COUNT


def room_for(rig: LendingRig, count: int) -> int:
    """Return for how many objects the tier lends memory, also by eviction."""
    rig.announce(*objects(count, 20))
    answers = list(rig.engine._stores._grants._answers.values())
    rig.engine.announce_stores([])
    return sum(isinstance(answer, LentObject) for answer in answers)


@pytest.mark.parametrize("problem", ["not yet", "never", "no means", "in this process"])
def test_until_it_is_pinned_staging_memory_is_used(new_rig: NewRig, problem: str) -> None:
    pinning = RecordedPinning(limit=0 if problem == "never" else 1000)
    if problem == "not yet":
        pinning.may_go_on.clear()
    rig = new_rig(None if problem == "no means" else pinning, "off" if problem == "in this process" else "engine")
    assert store_lent(rig, objects())
    expect_loaded(rig, objects())
    assert rig.pool.leases == 2 * COUNT
    pinning.may_go_on.set()


def test_an_object_is_stored_when_its_copy_into_lent_memory_has_ended(rig: LendingRig) -> None:
    rig.announce(*objects())
    copier(rig).is_held = True
    stored = rig.kv_cache[:COUNT].clone()
    rig.engine.submit_stores(objects())
    rig.kv_cache[:COUNT] = 1  # the engine uses the blocks again
    assert not rig.engine.drain_stores(0.1), "the store waits for its copy"
    copier(rig).let_go()
    assert rig.engine.drain_stores(SECONDS)
    assert set(rig.store_results().values()) == {True}
    rig.load(*elsewhere(objects()), tier="cpu")
    assert rig.result().status == "loaded"
    assert torch.equal(rig.kv_cache[40 : 40 + COUNT], stored)
    assert rig.pool.leases == 0


def test_a_full_device_buffer_gives_lent_memory_back(rig: LendingRig) -> None:
    copier(rig).is_held = True
    rig.announce(*objects(COUNT + 3))
    rig.engine.submit_stores(objects(COUNT + 3))
    assert set(rig.store_results().values()) == {False}
    copier(rig).let_go()
    assert rig.engine.drain_stores(SECONDS)
    assert set(rig.store_results().values()) == {True}
    assert rig.counted("store_dropped", "cpu") == 3
    rig.step_until(lambda: store_lent(rig, objects(COUNT, 20)))
    rig.step_until(lambda: store_lent(rig, objects(COUNT, 28)))
    expect_loaded(rig, objects(2 * COUNT, 20))


def test_objects_given_back_stay_lent_until_the_copies_that_read_them_have_ended(rig: LendingRig) -> None:
    assert store_lent(rig, objects())
    assert load_and_keep(rig, objects()).kept
    copier(rig).is_held = True
    copier(rig).orders_engine = False
    rig.engine.copy_kept("cpu", elsewhere(objects(), 50))
    rig.engine.give_back([JOB])
    rig.engine.poll()
    assert room_for(rig, 2 * COUNT) == COUNT, "the memory belongs to other objects during the copies"
    copier(rig).let_go()
    assert torch.equal(rig.kv_cache[50 : 50 + COUNT], rig.kv_cache[:COUNT])
    rig.step_until(lambda: room_for(rig, 2 * COUNT) == 2 * COUNT)
