"""The live curve in the scheduler half: requests that have ended, with their generated text, and those left out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from offload_core.config.loading import load_config
from offload_core.planning.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner
from offload_core.vllm.metadata import WorkerIdentity
from offload_core.vllm.scheduler import ended_requests
from offload_core.vllm.scheduler.half import SchedulerHalf
from tests.vllm.test_scheduler_half import BLOCK, request

SECONDS = 20
RAM = {"name": "ram", "type": "cpu", "capacity": "1MiB"}


class CurvedHalf:
    """A scheduler half with one tier in memory, and chunks of 16 tokens."""

    def __init__(self, **settings: Any) -> None:
        planner = HybridOffloadPlanner.build(
            [GroupGeometry(0, BLOCK, HitPolicy("full"))], hash_block_size=BLOCK, max_model_len=4096,
            hybrid_chunk_size=BLOCK,
        )  # fmt: skip
        config = load_config({"io_process": "off", "backends": [RAM], **settings})
        self.half = SchedulerHalf(config, planner, {"model": "m"}, num_ranks=1, num_blocks=100, step_tokens=4096)
        self.half.set_workers({0: WorkerIdentity({}, {"full-u16": 1000})})
        self._ratio = 0.0
        self._tokens = 0.0

    def serve(self, item: Any, computed_tokens: int | None = None) -> None:
        self.half.on_new_request(item)
        item.num_computed_tokens = item.num_tokens if computed_tokens is None else computed_tokens
        self.half.request_finished(item)

    def shown(self) -> tuple[float, int]:
        """The hit ratio that the gauge shows, and the prompt tokens behind it."""
        self.half._ended.settle(SECONDS)
        counts = self.half.counters.take()
        self._ratio += counts.get(("estimated_hit_ratio", "ram"), 0.0)
        self._tokens += counts.get(("estimated_prompt_tokens", "ram"), 0.0)
        return round(self._ratio, 9), round(self._tokens)


@pytest.fixture
def half() -> Iterator[CurvedHalf]:
    made = CurvedHalf()
    yield made
    made.half.shutdown()


def test_the_same_prompt_again_is_a_hit_up_to_its_last_token(half: CurvedHalf) -> None:
    half.serve(request("a"))
    assert half.shown() == (0, 80)
    half.serve(request("b"))
    assert half.shown() == (64 / 160, 160)


@pytest.mark.parametrize(("prompt_only", "hit_tokens"), [(False, 112), (True, 80)])
def test_the_next_turn_of_a_conversation_finds_the_generated_text(*, prompt_only: bool, hit_tokens: int) -> None:
    half = CurvedHalf(offload_prompt_only=prompt_only)
    half.serve(request("a", 112, num_prompt_tokens=80))
    half.serve(request("b", 160))
    shown = half.shown()
    half.half.shutdown()
    assert shown == (round(hit_tokens / 240, 9), 240)


def test_requests_that_cannot_be_hits_are_left_out(half: CurvedHalf) -> None:
    half.serve(request("ended early"), computed_tokens=79)
    for option in ("load", "store"):
        half.serve(request(option, kv_transfer_params={"hybrid_offload": {option: False}}))
    assert half.shown() == (0, 0)


def test_requests_without_a_place_in_the_queue_of_the_curves_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended_requests, "_MAX_WAITING", 2)
    half, gate = CurvedHalf(), threading.Event()
    half.half._ended._curves_thread.submit(gate.wait, SECONDS)
    for name in "abcd":
        half.serve(request(name))
    gate.set()
    assert half.shown() == (64 / 160, 160)
    half.serve(request("e"))
    assert half.shown() == (round(128 / 240, 9), 240)
    half.half.shutdown()


def test_a_request_that_ends_while_no_thread_can_be_started_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    half = CurvedHalf()
    with monkeypatch.context() as without_threads:
        without_threads.setattr(threading.Thread, "start", refuse)
        half.serve(request("a"))
        half.half.reset()
    for name in "bc":
        half.serve(request(name))
    assert half.shown() == (64 / 160, 160)
    half.half.shutdown()


def test_after_a_reset_nothing_is_found(half: CurvedHalf) -> None:
    half.serve(request("a"))
    half.half.reset()
    half.serve(request("b"))
    assert half.shown() == (0, 160)
