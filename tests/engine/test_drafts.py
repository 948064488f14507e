"""Speculative decoding: after a load, drafts are as good as after computing, and the tokens are the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny_drafts, tiny_models
from tests.support.engine.lab import Lab, objects, ours, served
from tests.support.engine.spec import PromptSpec, Round, RoundResult, RunResult, compare

VOCABULARY = 16
BLOCK = 128
LENGTHS = (300, 640, 900, 1153)
SHAPE = tiny_models.MistralShape(vocab_size=VOCABULARY)


@dataclass(frozen=True)
class Drafts:
    """A model and its drafts.

    Args:
        dropped_tokens: a hit is shorter by so many tokens than without drafts.
    """

    lab: Lab
    speculation: dict[str, Any]
    dropped_tokens: int

    def run(self, rounds: list[Round], transfer: dict[str, Any] | None) -> RunResult:
        """Run the rounds on a new engine."""
        return self.lab.run(rounds, transfer, extra_engine_args={"speculative_config": self.speculation})

    def hit_tokens(self, common_tokens: int) -> int:
        """The hit of a prompt that has these tokens in common with an earlier one."""
        return max(0, common_tokens // BLOCK * BLOCK - self.dropped_tokens)


def small_mistral(models: Path) -> Lab:
    return Lab("mistral", tiny_models.write_mistral(models / "mistral-drafted", shape=SHAPE), "float32", BLOCK)


def by_the_model_itself(models: Path) -> Drafts:
    """All drafts are right, unless the cache of the drafting model is wrong."""
    lab = small_mistral(models)
    return Drafts(lab, {"method": "draft_model", "model": str(lab.model), "num_speculative_tokens": 3}, 0)


def by_a_head(method: tiny_drafts.HeadMethod) -> Callable[[Path], Drafts]:
    def drafts(models: Path) -> Drafts:
        head = tiny_drafts.write_head(models / method, method, SHAPE, seed=3)  # right now and then
        speculation = {"method": method, "model": str(head), "num_speculative_tokens": 3}
        return Drafts(small_mistral(models), speculation, 0 if method == "dflash" else BLOCK)

    return drafts


def by_layers_of_the_model(models: Path) -> Drafts:
    lab = Lab("mimo", tiny_drafts.write_mimo(models / "mimo", SHAPE), "float32", BLOCK)
    return Drafts(lab, {"method": "mtp", "num_speculative_tokens": 2}, BLOCK)


KINDS = {
    "draft model": by_the_model_itself,
    "eagle": by_a_head("eagle"),
    "eagle3": by_a_head("eagle3"),
    "dflash": by_a_head("dflash"),
    "mtp": by_layers_of_the_model,
}
ALL = [pytest.param(name, marks=[] if name == "eagle" else [pytest.mark.long]) for name in KINDS]


@pytest.fixture
def drafts(request: pytest.FixtureRequest, models: Path) -> Drafts:
    return KINDS[request.param](models)


def prompts(common_tokens: int = 0, member: int = 0) -> list[PromptSpec]:
    """Prompts that share their first tokens with those of other members."""
    return [
        PromptSpec(
            name=str(length),
            token_ids=tiny_models.prompt_token_ids(
                length, seed=length, vocab_size=VOCABULARY, shared_prefix=common_tokens, member=member
            ),
            max_tokens=40,
        )
        for length in LENGTHS
    ]


def acceptance(result: RoundResult) -> float:
    assert result.drafted_tokens > 0
    return result.accepted_tokens / result.drafted_tokens


def three_rounds() -> list[Round]:
    """Prompts that are computed, found in the engine's own cache, and loaded."""
    return [
        Round(name="computed", prompts=prompts()),
        Round(name="found", prompts=prompts()),
        Round(name="loaded", prompts=prompts(), reset_prefix_cache_before=True),
    ]


@pytest.mark.long
@pytest.mark.parametrize("drafts", ALL, indirect=True)
def test_tokens_and_acceptance_after_a_load(drafts: Drafts, tmp_path: Path) -> None:
    alone = drafts.run(three_rounds()[:2], None)
    result = drafts.run(three_rounds(), ours(tmp_path / "kv", hybrid_chunk_size=BLOCK))
    computed, found, loaded = result.rounds
    hits = {str(length): drafts.hit_tokens(length - (not drafts.dropped_tokens)) for length in LENGTHS}
    assert set(served(result, 0).values()) == {0}
    assert served(result, 2) == hits
    for answers in (computed, found, loaded):
        renamed = answers.model_copy(update={"name": "computed"})
        only = alone.model_copy(update={"rounds": alone.rounds[:1]})
        assert compare(only, only.model_copy(update={"rounds": [renamed]})) == []
    assert alone.rounds[0].accepted_tokens > 0
    assert acceptance(computed) == pytest.approx(acceptance(alone.rounds[0]), abs=0.01)
    assert acceptance(loaded) == pytest.approx(acceptance(alone.rounds[1]), abs=0.01)


@pytest.mark.parametrize("drafts", ALL, indirect=True)
@pytest.mark.parametrize(
    "common_tokens", [256, pytest.param(257, marks=pytest.mark.long), pytest.param(384, marks=pytest.mark.long)]
)
def test_a_prompt_that_parts_from_another_takes_no_draft_of_it(
    drafts: Drafts, tmp_path: Path, common_tokens: int
) -> None:
    one, other = ([Round(name="one", prompts=prompts(common_tokens, member))] for member in (1, 2))
    drafts.run(one, ours(tmp_path / "one", hybrid_chunk_size=BLOCK))
    drafts.run(other, ours(tmp_path / "other", hybrid_chunk_size=BLOCK))
    common = {path.relative_to(tmp_path / "one") for path in objects(tmp_path / "one")}
    common &= {path.relative_to(tmp_path / "other") for path in objects(tmp_path / "other")}
    assert common
    for path in common:
        assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "other" / path).read_bytes(), path
    after = drafts.run(other, ours(tmp_path / "one", hybrid_chunk_size=BLOCK))
    assert served(after) == {str(length): drafts.hit_tokens(min(length - 1, common_tokens)) for length in LENGTHS}


@pytest.mark.long
def test_a_draft_cache_that_is_not_loaded_costs_acceptance_but_no_token(models: Path, tmp_path: Path) -> None:
    drafts = by_the_model_itself(models)
    fault = ours(tmp_path / "kv", hybrid_chunk_size=BLOCK) | {
        "kv_connector": "ForgetsDraftLayers",
        "kv_connector_module_path": "tests.engine.forgetful",
    }
    computed, _, loaded = drafts.run(three_rounds(), fault).rounds
    assert acceptance(computed) > 0.9
    assert acceptance(loaded) < acceptance(computed) - 0.1
    for one, two in zip(computed.prompts, loaded.prompts, strict=True):
        assert one.token_ids == two.token_ids
