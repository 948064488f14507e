"""Benchmarks stop, with a reason, where their figures would be wrong."""

from __future__ import annotations

from typing import cast

import pytest

from benchmarks import crossover
from benchmarks.live_engines import Answer, LiveEngine, Order
from tests.support.engine.spec import PromptResult, PromptSpec


class InstantEngine:
    """An engine that answers at once. Tiers serve some tokens of each prompt."""

    def __init__(self, served_tokens: int) -> None:
        self._served_tokens = served_tokens

    def tell(self, order: Order) -> Answer:
        return Answer(prompts=[self._answer(prompt) for prompt in order.prompts])

    def _answer(self, prompt: PromptSpec) -> PromptResult:
        return PromptResult(
            name=prompt.name,
            token_ids=[1],
            logprobs=[0.0],
            prompt_tokens=len(prompt.token_ids),
            local_cached_tokens=0,
            external_cached_tokens=self._served_tokens,
            ttft_seconds=0.001,
            total_seconds=0.001,
        )


RIGHT = {"compute": 0, "compute again": 0, "load": 256, "ours": 0}


def measured(served_tokens: dict[str, int]) -> int:
    live = {name: cast(LiveEngine, InstantEngine(tokens)) for name, tokens in served_tokens.items()}
    return len(crossover.measure(live, latency_ms=1, mb_per_second=1000, rounds=1))


def test_loads_and_computed_prompts_are_compared_if_they_are_such() -> None:
    assert measured(RIGHT) == len(crossover.LENGTHS)


@pytest.mark.parametrize(("name", "tokens"), [("load", 0), ("compute", 256), ("compute again", 256)])
def test_a_failed_load_does_not_count_as_a_fast_one(name: str, tokens: int) -> None:
    with pytest.raises(SystemExit, match=f"^{name}: tiers served {tokens} tokens of a prompt of 300 tokens"):
        measured(RIGHT | {name: tokens})
