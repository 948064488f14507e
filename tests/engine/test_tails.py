"""Hits inside blocks (``prefix_match_unit``): tails are served after a restart, and tiers complete local ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.labs import QUICK_LABS
from tests.engine.workloads import SEEDS, check_outputs, run_workloads
from tests.support.engine.lab import Lab, objects, ours, served
from tests.support.engine.spec import PromptSpec, Round, compare
from tests.support.workload import random_workload

MATCH_UNIT = 32
FINE: dict[str, Any] = {"extra_engine_args": {"prefix_match_unit": MATCH_UNIT}}


def _named(name: str, prompt: PromptSpec, tokens: int) -> PromptSpec:
    return prompt.model_copy(update={"name": name, "token_ids": prompt.token_ids[:tokens]})


@pytest.mark.parametrize("lab", QUICK_LABS, indirect=True)
def test_a_prompt_of_900_tokens_is_served_896_after_a_restart(lab: Lab, tmp_path: Path) -> None:
    (longest,) = lab.prompts(1200, family=41)
    stored = [_named("900", longest, 900), *lab.prompts(230, family=42)]
    asked = [*stored, _named("next turn", longest, 1200)]
    first = lab.run([Round(name="first", prompts=stored)], ours(tmp_path / "kv"), **FINE)
    second = lab.run([Round(name="second", prompts=asked)], ours(tmp_path / "kv"), **FINE)

    assert not any(served(first).values())
    assert served(second) == {"900": 896, "family42-230": 224, "next turn": 0}
    assert second.rounds[0].prompts[2].local_cached_tokens >= 768
    for result in (first, second):
        rounds = [Round(name=result.rounds[0].name, prompts=stored if result is first else asked)]
        assert compare(lab.reference(rounds, **FINE), result) == []


@pytest.mark.parametrize("lab", QUICK_LABS, indirect=True)
def test_the_next_turn_resumes_at_the_tail_of_the_last_one(lab: Lab, tmp_path: Path) -> None:
    (longest,) = lab.prompts(1200, family=43)
    turn, following = _named("turn", longest, 900), _named("next turn", longest, 1200)
    lab.run([Round(name="first", prompts=[turn])], ours(tmp_path / "kv"), **FINE)

    rounds = [Round(name="second", prompts=[following])]
    reading = {**ours(tmp_path / "kv"), "kv_role": "kv_consumer"}
    second = lab.run(rounds, reading, **FINE)
    assert served(second) == {"next turn": 896}
    assert compare(lab.reference(rounds, **FINE), second) == []

    for path in objects(tmp_path / "kv"):
        if path.parts[-3] == "full-u256-tail":
            path.unlink()
    third = lab.run(rounds, reading, **FINE)
    assert served(third) == {"next turn": 768}, "without a part of the tail, the last whole chunk"
    assert compare(lab.reference(rounds, **FINE), third) == []


@pytest.mark.long
def test_a_local_hit_that_ends_inside_a_block_is_completed_from_a_tier(qwen3_next: Lab, tmp_path: Path) -> None:
    (whole,) = qwen3_next.prompts(1400, family=44)
    qwen3_next.run([Round(name="first", prompts=[whole])], ours(tmp_path / "kv"), **FINE)

    prompts = [_named("shorter", whole, 900), _named("again", whole, 900), whole]
    rounds = [Round(name="second", prompts=prompts)]
    reading = {**ours(tmp_path / "kv"), "kv_role": "kv_consumer"}
    second = qwen3_next.run(rounds, reading, **FINE)

    _, again, completed = second.rounds[0].prompts
    assert (again.local_cached_tokens, again.external_cached_tokens) == (896, 0), "it ends inside a block of 256"
    assert (completed.local_cached_tokens, completed.external_cached_tokens) == (768, 1376 - 768)
    assert compare(qwen3_next.reference(rounds, **FINE), second) == []


@pytest.mark.long
def test_random_work_with_tails(lab: Lab, tmp_path: Path) -> None:
    many = [random_workload(seed) for seed in SEEDS]
    result = run_workloads(lab, many, ours(tmp_path / "kv"), **FINE)
    served_inside = [
        request
        for item in result.workloads
        for request in item.requests
        if request.external_cached_tokens
        and (request.local_cached_tokens + request.external_cached_tokens) % lab.block_size
    ]
    assert served_inside
    check_outputs(lab, many, result, **FINE)
