"""Scores: the spread of an engine alone passes, damage does not."""

from __future__ import annotations

import math
import random

import pytest

from tests.support.scores import MIN_TOKENS, rescoring, score_problems, token_gaps
from tests.support.workload import (
    RequestResult,
    Sample,
    Workload,
    WorkloadResult,
    random_workload,
)


def _result(name: str, logprobs: list[float], scores: list[float]) -> WorkloadResult:
    request = RequestResult(
        name=name, samples=[Sample(token_ids=list(range(4, 4 + len(logprobs))), logprobs=logprobs)], scores=scores,
        aborted=False, prompt_tokens=3, local_cached_tokens=0, external_cached_tokens=0, preemptions=0,
    )  # fmt: skip
    return WorkloadResult(name="w", requests=[request], steps=1, seconds=0.0)


def test_rescoring_asks_for_prompt_and_output_of_every_sample() -> None:
    asked = random_workload(1, requests=1)
    result = _result(asked.requests[0].name, [-1.0, -2.0], [])
    again = rescoring(asked, result)
    assert again.requests[0].token_ids == [*asked.requests[0].token_ids, 4, 5]
    assert again.requests[0].score_tokens == 2
    assert rescoring(Workload(name="w", requests=[]), result.model_copy(update={"requests": []})) == (
        Workload(name="scores of w", requests=[])
    )


@pytest.mark.parametrize(
    ("logprobs", "gaps"),
    [
        ([-1.0, -2.0], [0.0, 0.5]),
        ([-1.0, math.nan], [0.0, math.inf]),
        ([-math.inf, -2.0], [math.inf, 0.5]),
    ],
)
def test_gaps_are_those_between_reported_and_scored(logprobs: list[float], gaps: list[float]) -> None:
    scores = _result("a[0]", [], [-1.0, -2.5])
    assert token_gaps(_result("a", logprobs, []), scores) == {"a[0]": gaps}


def test_output_that_was_not_scored_has_no_gaps_and_one_scored_in_part_is_an_error() -> None:
    assert token_gaps(_result("b", [-1.0], []), _result("a[0]", [], [-1.0])) == {}
    with pytest.raises(ValueError, match="zip"):
        token_gaps(_result("a", [-1.0, -2.0], []), _result("a[0]", [], [-1.0]))


def _rounding(seed: str, samples: int = 30, *, typical: float = 0.08) -> dict[str, list[float]]:
    """Gaps as rounding makes them: most are small, one in a hundred tokens is off by nats."""
    draw = random.Random(seed)
    return {
        f"{seed} {number}": [
            draw.uniform(1, 5) if draw.random() < 0.01 else draw.expovariate(1 / typical)
            for _ in range(draw.randint(1, 90))
        ]
        for number in range(samples)
    }


@pytest.mark.parametrize("seed", range(50))
def test_two_runs_that_only_round_pass(seed: int) -> None:
    assert score_problems(_rounding(f"ours {seed}"), _rounding(f"alone {seed}")) == []


def test_run_without_gaps_passes_and_so_does_one_exactly_like_the_other() -> None:
    alone = _rounding("alone")
    assert score_problems({name: [0.0] * len(gaps) for name, gaps in alone.items()}, alone) == []
    assert score_problems(alone, alone) == score_problems({}, alone) == []


def test_engine_alone_that_is_exact_leaves_a_margin() -> None:
    alone = {"a": [0.0] * 10, "b": [0.0] * 10}
    assert score_problems({"a": [0.01] * 10, "b": [0.2] * 10, "c": [0.0] * 10}, alone) == []
    assert len(score_problems({"a": [0.01] * 10, "b": [0.5] * 10, "c": [0.0] * 10}, alone)) == 1


def test_one_sample_of_which_most_tokens_are_off_is_named() -> None:
    gaps = _rounding("ours")
    gaps["damaged"] = [1.4] * 11 + [0.0] * 9
    (line,) = score_problems(gaps, _rounding("alone"))
    assert line.startswith("damaged: half of 20 tokens are off by 1.400 nats or more")


def test_single_tokens_far_off_are_rounding() -> None:
    gaps = _rounding("ours")
    gaps["one expert more"] = [7.0, 6.0, *[0.1] * 10]
    gaps["too short to tell"] = [3.0] * (MIN_TOKENS - 1)
    assert score_problems(gaps, _rounding("alone")) == []


def test_log_probability_that_is_no_number_is_found_in_the_shortest_sample() -> None:
    (line,) = score_problems({**_rounding("ours"), "poisoned": [math.inf]}, _rounding("alone"))
    assert line == "poisoned: not a number"


def test_small_error_of_all_samples_is_found() -> None:
    gaps = {name: [gap + 0.2 for gap in sample] for name, sample in _rounding("ours").items()}
    (line,) = score_problems(gaps, _rounding("alone"))
    assert line.startswith("half of ")


@pytest.mark.parametrize("alone", [{}, {"a": [0.1] * (MIN_TOKENS - 1)}, {"a": [0.1] * 9, "b": [math.inf]}])
def test_engine_alone_that_shows_no_spread_is_a_problem(alone: dict[str, list[float]]) -> None:
    (line,) = score_problems(_rounding("ours"), alone)
    assert line.startswith("the engine without offloading shows no spread to judge by")
