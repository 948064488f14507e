"""Resets of the connector's cache, also with other memory for the KV cache, as in a sleep of the engine.

Nothing that was stored before is served afterwards, and nothing of it is destroyed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engine.lab import Lab, ours, served
from tests.support.engine.spec import Round, compare


@pytest.mark.every_version
@pytest.mark.parametrize("lab", ["gemma3", pytest.param("qwen3_next", marks=pytest.mark.long)], indirect=True)
def test_nothing_stored_before_a_reset_is_served_after_it(lab: Lab, tmp_path: Path) -> None:
    prompts = lab.prompts(700, 1283, family=20)
    rounds = [
        Round(name="store", prompts=prompts),
        Round(name="local reset only", prompts=prompts, reset_prefix_cache_before=True),
        Round(name="connector reset too", prompts=prompts, reset_connector_before=True),
        Round(name="stored anew", prompts=prompts, reset_prefix_cache_before=True),
        Round(name="other memory", prompts=prompts, new_memory_before=True),
        Round(name="stored from there", prompts=prompts, reset_prefix_cache_before=True),
    ]
    result = lab.run(rounds, ours(tmp_path / "kv"))

    assert compare(lab.reference(rounds[:1]), result.model_copy(update={"rounds": result.rounds[:1]})) == []
    for index in range(1, 6):
        tokens = [prompt.token_ids for prompt in result.rounds[index].prompts]
        assert tokens == [prompt.token_ids for prompt in result.rounds[0].prompts]
    assert all(served(result, 1).values())
    assert not any(served(result, 2).values())
    assert all(served(result, 3).values())
    assert not any(served(result, 4).values())
    assert all(served(result, 5).values())

    after_restart = lab.run(rounds[:1], ours(tmp_path / "kv"))
    assert all(served(after_restart).values()), "the reset belongs to one process; the weights on disk have not changed"
