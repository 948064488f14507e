"""The comparison of ``offload-core prove``, its prompts and its refusals, without an engine."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.cli.proof.comparison import LEAST_ALLOWED, Difference, allowed_gap, difference, judge
from offload_core.cli.proof.documents import Answer
from offload_core.cli.proof.prompts import ANSWER_TOKENS, prompt, prompt_lengths
from tests.core.cli.conftest import Site

ALLOWED = 1e-3


def answer(*scores: dict[int, float], tier_tokens: int = 256) -> Answer:
    """An answer with the most likely token at each place."""
    tokens = [max(place, key=place.__getitem__) for place in scores]
    return Answer(tokens=tokens, logprobs=list(scores), tier_tokens=tier_tokens)


RIGHT = answer({1: -0.1, 2: -3.0}, {3: -0.2, 4: -2.0})
WRONG = answer({1: -0.9, 2: -1.0}, {4: -0.2, 3: -2.0})
OTHERWISE_WRONG = answer({2: -0.1, 1: -3.0}, {3: -0.2, 4: -2.0})


@pytest.mark.parametrize(
    ("local", "loaded", "fault"),
    [
        (RIGHT, RIGHT, "none"),
        (WRONG, RIGHT, "none"),
        (RIGHT, WRONG, "tier"),
        (WRONG, WRONG, "vllm"),
        (WRONG, OTHERWISE_WRONG, "undecided"),
        (RIGHT, RIGHT.model_copy(update={"tier_tokens": 0}), "tier"),
    ],
)
def test_the_fault_is_given_to_the_one_that_differs(local: Answer, loaded: Answer, fault: str) -> None:
    verdict = judge("nvme", [RIGHT], [local], [loaded], ALLOWED)
    assert verdict.fault == fault
    assert "tier 'nvme'" in verdict.text
    assert ("nothing was served" in verdict.text) == (not loaded.tier_tokens)


@pytest.mark.parametrize(("tokens", "words"), [(256, "cache does not"), (0, "cache served nothing to compare with")])
def test_the_text_says_whether_the_local_cache_has_served(tokens: int, words: str) -> None:
    local = RIGHT.model_copy(update={"local_tokens": tokens})
    assert words in judge("nvme", [RIGHT], [local], [WRONG], ALLOWED).text


def test_another_token_at_a_near_tie_is_no_fault_and_ends_the_comparison() -> None:
    computed = answer({1: -0.7, 2: -0.7004}, {3: -0.1})
    loaded = answer({1: -0.7003, 2: -0.7}, {9: -5.0})
    verdict = judge("nvme", [computed], [computed], [loaded], ALLOWED)
    assert verdict.fault == "none"
    assert "1 differ at a near tie" in verdict.text


def test_another_token_with_a_clear_margin_is_a_difference() -> None:
    found = difference([answer({1: -0.1, 2: -3.0})], [answer({2: -0.1, 1: -3.0})])
    assert (found.other_tokens, found.within(ALLOWED)) == (1, False)
    assert found.margin == pytest.approx(2.9)


@pytest.mark.parametrize("loaded", [answer({1: math.nan, 2: -3.0}), answer({1: -math.inf}), answer()])
def test_missing_numbers_are_an_infinite_difference(loaded: Answer) -> None:
    assert difference([answer({1: -0.1, 2: -3.0})], [loaded]).gap == math.inf


@given(st.floats(0, 10), st.sampled_from([2**-23, 2**-10, 2**-7]))
def test_what_is_allowed_follows_the_measured_spread(spread: float, precision: float) -> None:
    allowed = allowed_gap(Difference(gap=spread), precision)
    assert allowed >= max(2 * spread, LEAST_ALLOWED)
    assert allowed == max(2 * spread, LEAST_ALLOWED, 8 * precision)
    assert math.isfinite(allowed_gap(Difference(gap=math.inf), precision))


@given(st.integers(1, 9000), st.lists(st.integers(1, 5000), max_size=3), st.integers(1, 40000))
def test_every_prompt_can_be_loaded_and_answered(chunk: int, windows: list[int], model_tokens: int) -> None:
    lengths = prompt_lengths(chunk, windows, model_tokens)
    assert all(chunk < length <= model_tokens - ANSWER_TOKENS for length in lengths)
    assert bool(lengths) == (chunk < model_tokens - ANSWER_TOKENS)


def test_prompts_are_the_same_each_time() -> None:
    assert prompt(300, 1024) == prompt(300, 1024)
    assert set(prompt(300, 2)) == {1}


def test_a_missing_vllm_is_told(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec

    def without_vllm(name: str, *rest: Any) -> Any:
        return None if name == "vllm" else find_spec(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without_vllm)
    done = site.invoke("prove", "MODEL")
    assert done.code == 2
    assert "vLLM is not installed" in done.err


def test_a_wrong_configuration_is_told_before_any_engine(site: Site) -> None:
    done = site.invoke("prove", "MODEL", "--config", str(site.folder / "missing.yaml"), "-tp", "2")
    assert done.code == 2
    assert "does not exist" in done.err
