"""Loads that do not pay are left out, on the real engine: the engine learns how slow a tier is, and computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engine.lab import Lab, count, installed, ours, served
from tests.support.engine.spec import Round, RunResult, compare

HELD_SECONDS = 6.0


@pytest.mark.long
def test_a_tier_that_is_slower_than_the_engine_serves_one_load_only(gemma3: Lab, tmp_path: Path) -> None:
    slow = {"name": "disk", "type": "held-disk", "path": str(tmp_path / "kv"), "held_seconds": HELD_SECONDS}
    rounds = [
        Round(name="stored", prompts=gemma3.prompts(3000)),
        Round(name="tried", prompts=gemma3.prompts(3000), reset_prefix_cache_before=True),
        Round(name="computed", prompts=gemma3.prompts(3000, 2900), reset_prefix_cache_before=True),
    ]
    transfer = ours(tmp_path / "kv", backends=[slow], load_when="cheaper")
    result = gemma3.run(rounds, transfer, env=installed(tmp_path, "held_disk"))

    assert compare(gemma3.reference(rounds), result) == []
    assert list(served(result, 1).values()) == [2816], "the first load is how the engine learns"
    assert set(served(result, 2).values()) == {0}
    assert count(result, "lookups_declined", "all") == 2, "not even their deepest hit would be worth a load"
    assert _seconds(result, "load_wait_seconds") >= HELD_SECONDS
    assert 0 < _seconds(result, "prefill_seconds_saved") < HELD_SECONDS


def test_a_tier_that_is_faster_than_the_engine_goes_on_serving(gemma3: Lab, tmp_path: Path) -> None:
    prompts = gemma3.prompts(7000)  # their prefill takes far longer than a slow load
    again = [Round(name=f"again {n}", prompts=prompts, reset_prefix_cache_before=True) for n in range(3)]
    rounds = [Round(name="stored", prompts=prompts), *again]
    result = gemma3.run(rounds, ours(tmp_path / "kv", load_when="cheaper"))

    assert compare(gemma3.reference(rounds), result) == []
    assert [tokens for number in range(1, 4) for tokens in served(result, number).values()] == [6912] * 3
    assert count(result, "loads_declined") == 0
    assert _seconds(result, "prefill_seconds_saved") > _seconds(result, "load_wait_seconds") > 0


def _seconds(result: RunResult, counter: str, tier: str = "disk") -> float:
    return result.metrics[f'vllm:hybrid_offload_{counter}_total{{tier="{tier}"}}']
