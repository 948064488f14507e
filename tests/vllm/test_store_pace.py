"""Stores that wait for a later step, since the workers have no room for them now."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from offload_core.memory.staging_size import lease_bytes
from offload_core.planning.planner import HitPolicy
from offload_core.vllm.metadata import StepMetadata, WorkerIdentity
from tests.vllm.test_scheduler_half import Half, request

OBJECT_BYTES = 10_000


@pytest.fixture
def half() -> Iterator[Half]:
    made = Half(policies=(HitPolicy("full"), HitPolicy("window", 16)))
    yield made
    made.half.shutdown()


def has_room_for(half: Half, objects: int, step_objects: int) -> None:
    sizes = {pack.name: OBJECT_BYTES for pack in half.half._planner.packs}
    lease = lease_bytes(OBJECT_BYTES)
    half.half.set_workers({0: WorkerIdentity({}, sizes, objects * lease, step_objects * lease)})


def units(step: StepMetadata, policy: str) -> list[bytes]:
    return [item.chunk.chunk_hash for item in step.stores if item.chunk.pack.startswith(policy)]


def end(half: Half, step: StepMetadata) -> None:
    half.report([item.chunk for item in step.stores])


def test_full_attention_waits_for_room_and_is_stored_from_the_head_on(half: Half) -> None:
    has_room_for(half, 100, step_objects=7)
    prompt = half.follow(request("a"))
    first = half.step(a=80)
    assert len(units(first, "window")) == 5, "their blocks may be gone in the next step"
    stored = units(first, "full")
    prompt.num_computed_tokens = 80
    while len(stored) < 5:
        end(half, first)
        first = step = half.step(a=1)
        assert 0 < len(units(step, "full")) <= 7
        stored += units(step, "full")
    assert stored == prompt.block_hashes[:5]
    assert not half.step(a=1).stores


def test_stores_on_their_way_count_until_they_have_ended(half: Half) -> None:
    has_room_for(half, 4, step_objects=100)
    prompt = half.follow(request("a"))
    first = half.step(a=80)
    left = 5 - len(units(first, "full"))
    assert left > 0
    prompt.num_computed_tokens = 80
    assert not half.step(a=1).stores, "there is no room yet"
    end(half, first)
    assert units(half.step(a=1), "full") == prompt.block_hashes[5 - left : 5]


def test_the_room_of_a_step_is_that_which_stores_on_their_way_leave(half: Half) -> None:
    has_room_for(half, 100, step_objects=6)
    prompt = half.follow(request("a"))
    first = half.step(a=80)
    assert len([item for item in first.stores if not item.spare]) == 6
    prompt.num_computed_tokens = 80
    assert not half.step(a=1).stores, "the device's buffer may still be full"
    end(half, first)
    assert units(first, "full") + units(half.step(a=1), "full") == prompt.block_hashes


def test_a_request_that_has_ended_leaves_no_store_behind(half: Half) -> None:
    has_room_for(half, 100, step_objects=6)
    prompt = half.follow(request("a"))
    end(half, half.step(a=80))
    half.half.request_finished(prompt)
    other = half.follow(request("b", family=1))
    assert units(half.step(b=80), "full")[0] == other.block_hashes[0]


def test_a_recurrent_state_has_its_room_before_full_attention() -> None:
    half = Half(policies=(HitPolicy("full"), HitPolicy("state")))
    has_room_for(half, 100, step_objects=3)
    half.follow(request("a"))
    half.states = {"a": [(1, 7, 80)]}
    step = half.step(a=80)
    half.half.shutdown()
    assert len(units(step, "state")) == 1
    assert len(units(step, "full")) == 2, "the rest waits for the next step"
