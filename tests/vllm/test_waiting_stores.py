"""Stores that wait for room as long as the engine's prefix cache has their blocks."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from offload_core.planning.chunk_keys import ChunkRef
from offload_core.planning.planner import HitPolicy
from offload_core.vllm.metadata import StepMetadata
from tests.vllm.test_scheduler_half import Half, request
from tests.vllm.test_store_pace import end, has_room_for, units

WINDOW = HitPolicy("window", 16)
BLOCKS = 100


class Pool:
    """A block pool in which the prefix cache has every block under a name of its own."""

    def __init__(self) -> None:
        self.blocks: Any = [SimpleNamespace(block_hash=bytes([number])) for number in range(BLOCKS)]

    def reuse(self, *block_ids: int) -> None:
        for block_id in block_ids:
            self.blocks[block_id].block_hash = None


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def half(pool: Pool) -> Iterator[Half]:
    made = Half(policies=(HitPolicy("full"), WINDOW), placement="everything")
    made.half.bind_block_pool(pool, 2, backfills=False)
    yield made
    made.half.shutdown()


def finish(half: Half, item: Any, blocks: int = BLOCKS - 1) -> None:
    """End a request that holds blocks 1, 2, ... in each group."""
    half.half.request_finished(item, [list(range(1, blocks + 1))] * 2)


def all_units(half: Half, first: StepMetadata, policy: str) -> list[bytes]:
    """Return the units of a step and of the idle steps that follow."""
    found, step = units(first, policy), first
    while half.half.has_work_when_idle:
        end(half, step)
        step = half.step()
        found += units(step, policy)
    return found


def test_windows_wait_for_room_and_are_stored_from_the_oldest_on(half: Half) -> None:
    has_room_for(half, 100, step_objects=2)
    prompt = half.follow(request("a"))
    step = half.step(a=80)
    assert units(step, "window") == prompt.block_hashes[:2]
    assert not units(step, "full"), "windows have the room before full attention"
    prompt.num_computed_tokens = 80
    end(half, step)
    step = half.step(a=1)
    assert units(step, "window") == prompt.block_hashes[2:4]
    end(half, step)
    step = half.step(a=1)
    assert (units(step, "window"), units(step, "full")) == (prompt.block_hashes[4:], prompt.block_hashes[:1])


def test_a_window_whose_block_is_reused_is_not_stored(half: Half, pool: Pool) -> None:
    has_room_for(half, 100, step_objects=2)
    prompt = half.follow(request("a"))
    step = half.step(a=80)
    prompt.num_computed_tokens = 80
    finish(half, prompt)
    pool.reuse(4)
    assert prompt.block_hashes[3] not in all_units(half, step, "window")
    names = {pack.policy.kind: pack.name for pack in half.half._planner.packs}
    lost = [ChunkRef(names[kind], prompt.block_hashes[3], "") for kind in ("full", "window")]
    assert all(map(half.half._ledger.is_absent, lost)), "chunks behind them are spare"
    assert half.half.counters.take()["store_blocks_reused", "all"] == 2, "the window, and its full attention"


def test_a_block_with_other_content_has_another_name(half: Half, pool: Pool) -> None:
    has_room_for(half, 100, step_objects=2)
    half.follow(request("a"))
    step = half.step(a=80)
    pool.blocks[4].block_hash = b"of another prompt"
    assert len(all_units(half, step, "window")) == 4


def test_full_attention_is_stored_after_the_end_of_its_request(half: Half) -> None:
    has_room_for(half, 100, step_objects=2)
    prompt = half.follow(request("a"))
    step = half.step(a=80)
    prompt.num_computed_tokens = 80
    finish(half, prompt)
    stored = {"full": units(step, "full"), "window": units(step, "window")}
    while half.half.has_work_when_idle:
        end(half, step)
        step = half.step()
        assert len(step.stores) <= 2
        for policy, found in stored.items():
            found += units(step, policy)
    assert stored == {"full": prompt.block_hashes, "window": prompt.block_hashes}


def test_an_idle_engine_is_not_kept_awake_for_ever(half: Half, monkeypatch: pytest.MonkeyPatch) -> None:
    has_room_for(half, 4, step_objects=100)
    prompt = half.follow(request("a"))
    assert len(half.step(a=80).stores) == 4
    prompt.num_computed_tokens = 80
    finish(half, prompt)
    step = half.step()
    assert step.stores_wait
    assert not step.stores, "the stores on their way have not ended"
    now = SimpleNamespace(monotonic=lambda: float("inf"))
    monkeypatch.setattr("offload_core.vllm.scheduler.stores.waiting_stores.time", now)
    assert not half.half.has_work_when_idle


def test_a_request_that_held_too_few_blocks_leaves_only_those(half: Half) -> None:
    has_room_for(half, 100, step_objects=5)
    prompt = half.follow(request("a"))
    step = half.step(a=80)
    prompt.num_computed_tokens = 80
    finish(half, prompt, blocks=2)
    assert all_units(half, step, "full") == prompt.block_hashes[:2]


def test_a_chunk_that_another_request_has_stored_meanwhile_is_not_stored_again(half: Half) -> None:
    has_room_for(half, 100, step_objects=5)
    first, second = half.follow(request("a")), half.follow(request("b"))
    step = half.step(a=80, b=80)
    stored = [item.chunk for item in step.stores]
    for item in (first, second):
        item.num_computed_tokens = 80
        finish(half, item)
    while half.half.has_work_when_idle:
        end(half, step)
        step = half.step()
        stored += [item.chunk for item in step.stores]
    assert len(stored) == len(set(stored)) == 10


def test_a_reset_forgets_them(half: Half) -> None:
    has_room_for(half, 100, step_objects=2)
    prompt = half.follow(request("a"))
    half.step(a=80)
    prompt.num_computed_tokens = 80
    finish(half, prompt)
    half.half.reset()
    assert not half.half.has_work_when_idle
    assert not half.step().stores


def test_without_the_prefix_cache_windows_are_stored_at_once(half: Half, pool: Pool) -> None:
    pool.reuse(*range(BLOCKS))
    has_room_for(half, 100, step_objects=2)
    prompt = half.follow(request("a"))
    assert units(half.step(a=80), "window") == prompt.block_hashes
    finish(half, prompt)
    assert not half.half.has_work_when_idle


def test_spare_windows_wait_until_full_attention_has_had_its_room(pool: Pool) -> None:
    half = Half(policies=(HitPolicy("full"), WINDOW), placement="kept and spare")
    half.half.bind_block_pool(pool, 2, backfills=False)
    has_room_for(half, 100, step_objects=4)
    prompt = half.follow(request("a"))
    step, stored = half.step(a=80), []
    prompt.num_computed_tokens = 80
    finish(half, prompt)
    while step.stores:
        stored += step.stores
        assert len(step.stores) <= 4
        end(half, step)
        step = half.step()
    half.half.shutdown()
    assert len(stored) == 10
    assert {item.chunk.pack.split("-")[0] for item in stored if item.spare} == {"window"}
    assert [item.spare for item in stored] == sorted(item.spare for item in stored)
