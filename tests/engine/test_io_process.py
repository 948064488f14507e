"""Tiers in the I/O process under a real engine: the same outputs, also while the process is killed and stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.workloads import check_outputs, run_workloads
from tests.support.engine.lab import Lab, count, ours, served
from tests.support.engine.spec import compare
from tests.support.workload import random_workload

HURT: dict[str, Any] = {"around_workloads": "tests.support.engine.process_kills:under_kills"}


def backends(folder: Path) -> list[dict[str, Any]]:
    return [
        {"name": "ram", "type": "cpu", "capacity": "64MiB"},
        {"name": "disk", "type": "disk", "path": str(folder), "capacity": "256MiB"},
    ]


@pytest.mark.parametrize("mode", ["engine", pytest.param("tier", marks=pytest.mark.long)])
def test_outputs_are_those_without_offloading(gemma3: Lab, tmp_path: Path, mode: str) -> None:
    rounds = gemma3.standard()
    config = ours(tmp_path, hybrid_chunk_size=128, io_process=mode, backends=backends(tmp_path))
    first = gemma3.run(rounds, config)
    assert compare(gemma3.alone(rounds), first) == []
    second = gemma3.run(rounds, config)
    assert compare(gemma3.alone(rounds), second) == []
    assert all(served(second).values())
    assert count(second, "load_hits") > 0
    assert count(second, "promotions", "ram") > 0


@pytest.mark.parametrize(
    ("model", "seeds"),
    [
        pytest.param("gemma3", (1,), id="gemma3"),
        pytest.param("gemma3", tuple(range(2, 8)), id="gemma3-many", marks=pytest.mark.long),
        pytest.param("qwen3_next", tuple(range(1, 4)), id="qwen3_next-many", marks=pytest.mark.long),
    ],
)
def test_outputs_are_exact_while_the_process_is_killed_and_stopped(
    request: pytest.FixtureRequest, tmp_path: Path, model: str, seeds: tuple[int, ...]
) -> None:
    lab: Lab = request.getfixturevalue(model)
    plain = [random_workload(seed) for seed in seeds]
    hurt = [
        item.model_copy(update={"name": f"{item.name}-hurt", "fault_seed": seed})
        for item, seed in zip(plain, seeds, strict=True)
    ]
    workloads = [work for pair in zip(plain, hurt, strict=True) for work in pair]
    config = ours(tmp_path, hybrid_chunk_size=lab.block_size, io_process="engine", backends=backends(tmp_path / "kv"))
    result = run_workloads(lab, workloads, config, **HURT)
    check_outputs(lab, workloads, result)
    notes = [item.notes for item in result.workloads]
    assert [item["left"] for item in notes] == [{}] * len(notes)
    assert sum(item["kills"] for item in notes) >= len(seeds)
    assert sum(request.external_cached_tokens for item in result.workloads for request in item.requests) > 0
