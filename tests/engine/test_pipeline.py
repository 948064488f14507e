"""Pipeline stages: each rank stores the blocks of its own layers, and a hit needs the parts of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from tests.support import tiny_models
from tests.support.engine.lab import Lab, objects, ours, served
from tests.support.engine.spec import Round, compare

# On a CPU, vLLM 0.32 makes the tensors between two stages in its warm-up only, which an eager engine leaves out.
# The environment of the runs turns compilation itself off.
TWO_STAGES: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    "extra_engine_args": {"enforce_eager": False, "compilation_config": {"mode": 1}},
}


@pytest.fixture(params=["gemma3", "qwen3_next"])
def lab(request: pytest.FixtureRequest, models: Path) -> Lab:
    """Both models. vLLM on CPUs wants a layer of attention in each stage, so Qwen3-Next has twice its layers."""
    if request.param == "gemma3":
        return cast("Lab", request.getfixturevalue("gemma3"))
    folder = tiny_models.write_qwen3_next(models / "qwen3-next-8", num_layers=8)
    return Lab("qwen3_next_8", folder, "bfloat16", 256)


@pytest.mark.long
def test_two_pipeline_stages_each_find_their_part(lab: Lab, tmp_path: Path) -> None:
    rounds = [Round(name="prompts", prompts=lab.prompts(700, 1283, family=5))]
    first = lab.run(rounds, ours(tmp_path / "kv"), **TWO_STAGES)
    second = lab.run(rounds, ours(tmp_path / "kv"), **TWO_STAGES)

    alone = lab.reference(rounds, **TWO_STAGES)
    for result in (first, second):
        assert compare(alone, result) == []
    assert not any(served(first).values())
    assert served(second) == {"family5-700": 512, "family5-1283": 1280}

    stages = sorted({path.parents[2] for path in objects(tmp_path / "kv")})
    assert len(stages) == 2, "each rank has a fingerprint of its own"
    for path in objects(stages[0]):  # one rank's part is gone: no hit, whatever the other rank has
        path.unlink()
    third = lab.run(rounds, ours(tmp_path / "kv"), **TWO_STAGES)
    assert compare(alone, third) == []
    assert not any(served(third).values())
