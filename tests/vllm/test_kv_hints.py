"""KV hints in the scheduler half: the touches and prefetches of each step, and the answers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from offload_core.vllm.kv_hints import ANSWER_KEY, transfer_params
from tests.vllm.test_placement_plan import FULL, FULL_NAME, WINDOW, WINDOW_NAME, PlacedHalf
from tests.vllm.test_scheduler_half import request


def hinted(name: str, *actions: tuple[str, dict[str, Any]], tokens: int = 80, **fields: Any) -> Any:
    """A request with an envelope as vLLM gives it to a connector."""
    envelope = SimpleNamespace(
        protocol_version="0.1",
        message_id="m",
        actions=[
            SimpleNamespace(action_id=kind, action_type=kind, action_version="1.0", payload=payload)
            for kind, payload in actions
        ],
    )
    return request(name, tokens, kv_hints=envelope, **fields)


@pytest.fixture
def half() -> Iterator[PlacedHalf]:
    made = PlacedHalf(FULL, WINDOW)
    yield made
    made.half.shutdown()


def end(half: PlacedHalf, item: Any) -> list[dict[str, Any]]:
    """End a request that has computed all its tokens; returns the answers to its actions."""
    item.num_computed_tokens = item.num_tokens
    (answer,) = half.half.request_finished(item) or [{}]
    actions = answer["actions"]
    assert isinstance(actions, list)
    return actions


def test_a_demotion_makes_the_chunks_behind_its_head_spare(half: PlacedHalf) -> None:
    item = half.follow(hinted("a", ("kv.demote", {"from_tokens": 32})))
    half.store(a=80)
    half.step()
    assert [action["status"] for action in end(half, item)] == ["accepted"]
    touched = half.touched()
    assert {(pack, unit) for pack, unit, _ in touched} == {
        (pack, unit) for pack in (FULL_NAME, WINDOW_NAME) for unit in (2, 3, 4)
    }
    assert all(spare for _, _, spare in touched)
    assert [unit for _, unit, _ in touched] == [4, 4, 3, 3, 2, 2], "the deepest go first"


def test_a_protected_chunk_never_becomes_spare(half: PlacedHalf) -> None:
    item = half.follow(hinted("a", ("kv.pin", {"tokens": 32}), ("kv.demote", {})))
    half.store(a=80)
    half.step()
    end(half, item)
    spare = {(pack, unit): is_spare for pack, unit, is_spare in half.touched()}
    protected = {(FULL_NAME, 0), (FULL_NAME, 1), (WINDOW_NAME, 1)}
    assert {place for place, is_spare in spare.items() if not is_spare} == protected


def test_the_windows_of_a_pinned_boundary_are_kept_as_they_are_stored(half: PlacedHalf) -> None:
    half.follow(hinted("a", ("kv.pin", {"tokens": 40})))
    stored = half.step(a=80).stores
    spare = {item.chunk.chunk_hash[1]: item.spare for item in stored if item.chunk.pack == WINDOW_NAME}
    assert spare == {0: True, 1: False, 2: True, 3: False, 4: False}


def test_a_pin_is_touched_with_the_next_step_and_a_retention_ends(half: PlacedHalf) -> None:
    half.follow(hinted("a", ("kv.retain", {"seconds": 1e-6, "tokens": 16}), ("kv.pin", {"tokens": 32})))
    assert set(half.touched()) == {(FULL_NAME, 0, False), (FULL_NAME, 1, False), (WINDOW_NAME, 1, False)}


def test_a_reset_drops_touches_and_prefetches(half: PlacedHalf) -> None:
    item = half.follow(hinted("a", ("kv.pin", {}), ("kv.prefetch", {})))
    half.half.reset()
    assert half.touched() == []
    assert not half.half.has_work_when_idle
    half.finish(item)
    assert half.touched() == []


def test_without_an_order_of_eviction_nothing_can_be_protected() -> None:
    half = PlacedHalf(FULL, prepare=lambda backend: None)
    try:
        answers = end(half, half.follow(hinted("a", ("kv.pin", {}), ("kv.demote", {}))))
        assert [answer["reason"] for answer in answers] == [
            "no tier of this engine has an order of eviction that hints could change"
        ] * 2
    finally:
        half.half.shutdown()


def test_the_answer_has_a_key_of_its_own() -> None:
    item = hinted("a", ("kv.pin", {}))
    assert transfer_params(item, None) is None
    assert transfer_params(item, [{"actions": []}]) == {ANSWER_KEY: [{"actions": []}]}
    assert ANSWER_KEY != "hybrid_offload"
