"""Staging memory that is far smaller than the prompts of one step: their objects are stored step by step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engine.lab import UNTIL_STORED, Lab, count, ours, served
from tests.support.engine.spec import Round, compare

STEP_TOKENS = 8192


@pytest.mark.long
@pytest.mark.parametrize("output_tokens", [1, 60])
def test_prompts_that_staging_memory_cannot_hold_are_stored_in_later_steps(
    gemma3: Lab, tmp_path: Path, output_tokens: int
) -> None:
    prompts = gemma3.prompts(3000, 3500, max_tokens=output_tokens)
    rounds = [Round(name="prompts", prompts=prompts, one_at_a_time=False)]
    transfer = ours(tmp_path / "kv", hybrid_chunk_size=gemma3.block_size, staging_bytes="6MiB")
    first, second = (
        gemma3.run(rounds, transfer, max_num_batched_tokens=STEP_TOKENS, extra_engine_args=UNTIL_STORED)
        for _ in range(2)
    )
    reference = gemma3.reference(rounds, max_num_batched_tokens=STEP_TOKENS, extra_engine_args=UNTIL_STORED)
    assert compare(reference, second) == []
    assert count(first, "store_dropped") > 0, "there is no room for spare windows"
    assert served(second) == {prompt.name: prompt.prompt_tokens // 128 * 128 for prompt in reference.rounds[0].prompts}
