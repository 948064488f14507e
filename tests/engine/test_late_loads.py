"""Loads that are late on the real engine: their blocks belong to others by then, or what had come is used."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.engine.workloads import at_once, check_outputs
from tests.support.engine.lab import UNTIL_STORED, Lab, count, installed, ours, served
from tests.support.engine.spec import Round, compare

ONE_GROUP: dict[str, Any] = {"extra_engine_args": {"disable_hybrid_kv_cache_manager": True}}


def held(folder: Path, options: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """Our connector on the disk that holds loads, or fails them."""
    return ours(folder, backends=[{"name": "disk", "type": "held-disk", "path": str(folder), **options}], **keys)


@pytest.mark.parametrize("model", ["gemma3", pytest.param("qwen3_next", marks=pytest.mark.long)])
def test_blocks_of_a_late_load_keep_what_other_requests_have_computed(
    request: pytest.FixtureRequest, tmp_path: Path, model: str
) -> None:
    lab: Lab = request.getfixturevalue(model)
    prompt = lab.prompts(1500)
    others = [prompt for family in range(1, 5) for prompt in lab.prompts(1500, family=family, max_tokens=48)]
    rounds = [
        Round(name="stored", prompts=prompt),
        Round(name="late", prompts=prompt, reset_prefix_cache_before=True),
    ]
    workload = at_once("others", others)
    engine: dict[str, Any] = {
        "num_gpu_blocks_override": 160, "max_model_len": 2048, "extra_engine_args": UNTIL_STORED,
    }  # fmt: skip
    transfer = held(tmp_path / "kv", {"held_until_stored": len(others)}, load_timeout_seconds=0.2)
    result = lab.run(rounds, transfer, env=installed(tmp_path, "held_disk"), workloads=[workload], **engine)

    assert count(result, "load_timeouts") == 1
    assert compare(lab.reference(rounds, **engine), result) == []
    check_outputs(lab, [workload], result, small=False, **engine)
    assert count(result, "load_late") > 0, "it came after all, while the others were using the blocks"


@pytest.mark.parametrize(
    "options",
    [pytest.param({"held_seconds": 60.0}, id="late"), pytest.param({}, id="failed", marks=pytest.mark.long)],
)
def test_the_part_of_a_load_that_has_come_is_used(gemma3: Lab, tmp_path: Path, options: dict[str, Any]) -> None:
    prompt = gemma3.prompts(3000)
    rounds = [
        Round(name="stored", prompts=prompt),
        Round(name="part", prompts=prompt, reset_prefix_cache_before=True),
    ]
    lines: list[str] = []
    transfer = held(tmp_path / "kv", {"answered_calls": 1, **options}, load_timeout_seconds=5, hybrid_chunk_size=128)
    result = gemma3.run(rounds, transfer, env=installed(tmp_path, "held_disk"), on_line=lines.append, **ONE_GROUP)

    assert compare(gemma3.reference(rounds, **ONE_GROUP), result) == []
    assert count(result, "load_partial") == 1
    assert count(result, "recomputed_requests", "all") == 0, "nothing is computed from the start"
    (offered,) = served(result, 1).values()
    (missing,) = (int(found[1]) for line in lines if (found := re.search(r"rescheduled \((\d+) tokens", line)))
    assert 0 < missing < offered, "vLLM computes what is missing, and no more"
    assert count(result, "load_hits") >= (offered - missing) // 128
