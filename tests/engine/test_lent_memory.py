"""A ``cpu`` tier lends its memory: the engine copies each object once, and continues as without the tier.

A prefix that was loaded before is loaded within the step that runs its request.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.labs import QUICK_LABS
from tests.support.engine.lab import Lab, count, installed, ours, served
from tests.support.engine.spec import Round, compare


@pytest.mark.parametrize("mode", ["engine", pytest.param("off", marks=pytest.mark.long)])
@pytest.mark.parametrize("model", QUICK_LABS)
def test_objects_move_between_the_kv_cache_and_the_tiers_memory(
    model: str, mode: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    lab: Lab = request.getfixturevalue(model)
    prompts = lab.prompts(700, 1283, family=8)
    rounds = [
        Round(name="stored", prompts=prompts),
        Round(name="loaded", prompts=prompts, reset_prefix_cache_before=True),
        Round(name="loaded within the step", prompts=prompts, reset_prefix_cache_before=True),
    ]
    tier = {"name": "ram", "type": "cpu", "capacity": "256MiB"}
    result = lab.run(rounds, ours(tmp_path, hybrid_chunk_size=lab.block_size, io_process=mode, backends=[tier]))

    assert compare(lab.reference(rounds), result) == []
    assert min(served(result, 1).values()) > 500
    assert served(result, 2) == served(result, 1)
    assert count(result, "loads_within_step", "ram") == len(prompts)
    assert count(result, "load_kept", "ram") == count(result, "load_hits", "ram")
    assert count(result, "load_lent", "ram") == count(result, "load_hits", "ram") > 0
    # If the answer about an object's room is late, the object passes through staging memory.
    assert 0 < count(result, "store_lent", "ram") <= count(result, "stores", "ram")


@pytest.mark.parametrize("lab", ["gemma3", pytest.param("qwen3_next", marks=pytest.mark.long)], indirect=True)
def test_objects_that_are_damaged_in_lent_memory_are_computed(lab: Lab, tmp_path: Path) -> None:
    prompts = lab.prompts(700, 1283, family=9)
    rounds = [
        Round(name=name, prompts=prompts, reset_prefix_cache_before=True) for name in ("stored", "damaged", "healed")
    ]
    tier = {"name": "ram", "type": "rotting-cpu", "capacity": "256MiB"}
    transfer = ours(tmp_path, hybrid_chunk_size=lab.block_size, backends=[tier])
    result = lab.run(rounds, transfer, env=installed(tmp_path, "rotting_cpu", "tests.support"))

    assert compare(lab.reference(rounds), result) == []
    assert not any(served(result, 1).values()), "nothing that is left can be whole"
    assert min(served(result, 2).values()) > 500
    assert count(result, "recomputed_requests", "all") == len(prompts)
    assert count(result, "load_corrupt", "ram") > 0
    assert count(result, "load_lent", "ram") == count(result, "load_hits", "ram") > count(result, "load_corrupt", "ram")
