"""Pipeline stages: each rank stores the blocks of its own layers, and a hit needs the parts of all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engine.lab import Lab, objects, ours, served
from tests.support.engine.spec import Round, compare


@pytest.mark.parametrize("lab", [pytest.param("gemma3", id="gemma3"), "qwen3_next"], indirect=True)
def test_two_pipeline_stages_each_find_their_part(lab: Lab, tmp_path: Path) -> None:
    rounds = [Round(name="prompts", prompts=lab.prompts(700, 1283, family=5))]
    transfer = ours(tmp_path / "kv")

    first = lab.run(
        rounds,
        transfer,
        pipeline_parallel_size=2,
        extra_engine_args={"enforce_eager": False, "compilation_config": {"mode": 1}},
    )
    second = lab.run(
        rounds,
        transfer,
        pipeline_parallel_size=2,
        extra_engine_args={"enforce_eager": False, "compilation_config": {"mode": 1}},
    )
    print(served(second), len(objects(tmp_path / "kv")))

    for result in (first, second):
        assert compare(lab.reference(rounds), result) == []
    assert not any(served(first).values())
    assert all(served(second).values())
