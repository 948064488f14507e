"""Tiers in the I/O process under a real engine: the same outputs, also while the process is killed and stopped."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.engine import stalled
from tests.engine.test_shutdown import Script
from tests.engine.workloads import check_outputs, run_workloads
from tests.support.engine.lab import Lab, count, installed, objects, ours, served
from tests.support.engine.spec import Round, compare, logged_problems
from tests.support.polling import wait_until
from tests.support.process_state import command_line, descendants, io_process_ids, is_running, shared_memory_of
from tests.support.workload import random_workload

HURTS = 200
TURNS = 5
MAX_RUNS = 8
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


@pytest.mark.long
def test_two_ranks_and_the_scheduler_have_one_process_and_one_memory(gemma3: Lab, tmp_path: Path) -> None:
    (first,) = gemma3.standard()
    again = first.model_copy(update={"name": "again", "reset_prefix_cache_before": True})
    rounds = [first, again, again.model_copy(update={"name": "within the step"})]
    config = ours(tmp_path, hybrid_chunk_size=128, io_process="engine", backends=backends(tmp_path)[:1])
    seen: set[int] = set()

    def look(progress: dict[str, Any]) -> None:
        seen.update(pid for pid in descendants() if b"offload_core.io_process" in command_line(pid))

    lines: list[str] = []
    result = gemma3.run(rounds, config, tensor_parallel_size=2, on_progress=look, on_line=lines.append)
    assert logged_problems(lines) == []
    assert compare(gemma3.reference(rounds), result) == []
    assert all(served(result, 1).values())
    assert served(result, 2) == served(result, 1)
    assert count(result, "loads_within_step", "ram") == len(first.prompts)
    assert len(seen) == 1
    assert not any(map(is_running, seen))


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


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_outputs_are_exact_through_two_hundred_kills_and_stops(gemma3: Lab, tmp_path: Path) -> None:
    plain = [random_workload(seed) for seed in range(20, 24)]
    transfer = ours(
        tmp_path,
        hybrid_chunk_size=gemma3.block_size,
        io_process="engine",
        io_process_timeout_seconds=2,
        backends=backends(tmp_path / "kv"),
    )
    totals: Counter[str] = Counter()
    for run in range(MAX_RUNS):
        hurt = [item.model_copy(update={"fault_seed": f"{run}-{turn}"}) for turn in range(TURNS) for item in plain]
        result = run_workloads(gemma3, hurt, transfer, **HURT)
        check_outputs(gemma3, hurt, result)
        notes = [item.notes for item in result.workloads]
        assert [item.pop("left") for item in notes] == [{}] * len(notes)
        for item in notes:
            totals.update(item)
        hurts = totals["kills"] + totals["stops"] + totals["silences"]
        assert list((tmp_path / "kv").rglob("*.tmp")) == []
        if hurts >= HURTS:
            break
    assert hurts >= HURTS, totals
    assert totals["silences"] > 0, totals
    assert totals["served"] >= hurts // 10, totals


@pytest.mark.parametrize(
    "hangs", [pytest.param(False, id="works"), pytest.param(True, id="hangs", marks=pytest.mark.long)]
)
def test_nothing_is_left_of_an_engine_that_is_killed_in_the_middle_of_its_work(
    gemma3: Lab, tmp_path: Path, hangs: bool
) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    keys = {
        "hybrid_chunk_size": 128, "io_process": "engine", "backends": backends(folder), "placement": "everything",
    }  # fmt: skip
    whole = 2 * (700 // 128 + 1283 // 128)  # one of attention and one of windows for each chunk
    slow = dict.fromkeys(("load_timeout_seconds", "lookup_timeout_seconds", "store_timeout_seconds"), 60)
    env = installed(tmp_path, "stalled")
    script = Script(gemma3, ours(tmp_path, **keys, **slow), tmp_path / "errors", steps=100_000, env=env)
    with contextlib.closing(script):
        script.wait_for("stored")
        wait_until(lambda: len(objects(folder)) >= whole, "the prompts are not stored")
        stored = len(objects(folder))
        helpers = io_process_ids(script.process.pid)
        assert len(helpers) == 1
        memory = shared_memory_of(script.process.pid)
        assert memory
        if hangs:
            stalled.signal_file(folder).touch()
        script.go_on()
        if hangs:
            wait_until(stalled.witness_file(folder).exists, "no call has hung")
        else:
            wait_until(lambda: len(objects(folder)) > stored, "nothing is stored")
        script.process.kill()
        script.process.wait()
    wait_until(lambda: not any(map(is_running, helpers)), "the I/O process outlives the engine")
    assert not any(memory & shared_memory_of(int(entry.name)) for entry in Path("/proc").glob("[0-9]*"))

    rounds = [Round(name="again", prompts=gemma3.prompts(700, 1283, family=120))]
    again = gemma3.run(rounds, ours(tmp_path, **keys))
    assert compare(gemma3.reference(rounds), again) == []
    assert any(served(again).values()), "the objects of the killed engine are used"
    assert list(folder.rglob("*.tmp")) == []
