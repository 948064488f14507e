"""Random workloads under pressure: outputs as without offloading, and no less served from cache than by stock vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.labs import QUICK_LABS
from tests.engine.workloads import (
    SEEDS,
    alone,
    check_against_stock,
    check_outputs,
    differences_one_at_a_time,
    one_at_a_time,
    output_problems,
    run_workloads,
)
from tests.support.engine.lab import Lab, installed, ours, stock
from tests.support.engine.spec import RunResult
from tests.support.workload import Workload, WorkloadAction, WorkloadResult, compare_workloads, random_workload

LONG_SEEDS = tuple(range(3, 13))
FEW_TOKENS = 12
"""The most that a request generates in short: a byte that is not loaded shows in the first token already."""
ROUNDING_BY_BATCH: dict[str, Any] = {"around_workloads": "tests.support.engine.batch_rounding:rounding_by_batch"}


def _changed(workload: Workload, **values: Any) -> Workload:
    return workload.model_copy(update={"requests": [item.model_copy(update=values) for item in workload.requests]})


@pytest.fixture(scope="module")
def workloads() -> list[Workload]:
    return [random_workload(seed) for seed in SEEDS]


@pytest.fixture(scope="module")
def under_pressure(lab: Lab, workloads: list[Workload], tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """Ours, its chunks of one block."""
    folder = tmp_path_factory.mktemp(f"workload-{lab.name}") / "kv"
    return run_workloads(lab, workloads, ours(folder, hybrid_chunk_size=lab.block_size))


def test_outputs_are_those_without_offloading(lab: Lab, workloads: list[Workload], under_pressure: RunResult) -> None:
    # Which workload is preempted depends on the time that its loads take.
    assert sum(result.preemptions for result in under_pressure.workloads) > 0
    for result in under_pressure.workloads:
        assert any(request.external_cached_tokens for request in result.requests)
    check_outputs(lab, workloads, under_pressure)


def test_every_token_has_its_time(under_pressure: RunResult) -> None:
    for result in under_pressure.workloads:
        for request in result.requests:
            if len(request.samples) == 1:
                times = request.token_seconds
                assert len(times) == len(request.samples[0].token_ids)
                assert times == sorted(times)
                assert all(0 < seconds < result.seconds for seconds in times)


def test_as_much_comes_from_cache_as_with_stock(lab: Lab, workloads: list[Workload], under_pressure: RunResult) -> None:
    check_against_stock(lab, workloads, under_pressure)


def _forgetting(fault: str, folder: Path, **extra_config: Any) -> dict[str, Any]:
    """Our connector with a fault of :mod:`tests.engine.forgetful`."""
    return ours(folder, **extra_config) | {
        "kv_connector": fault,
        "kv_connector_module_path": "tests.engine.forgetful",
    }


@pytest.mark.parametrize(
    "fault", ["ForgetsFirstChunk", pytest.param("ForgetsFirstChunkOverOldBytes", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("lab", QUICK_LABS, indirect=True)
def test_chunk_that_is_not_loaded_is_seen(lab: Lab, workloads: list[Workload], tmp_path: Path, fault: str) -> None:
    result = run_workloads(lab, workloads, _forgetting(fault, tmp_path / "kv", hybrid_chunk_size=lab.block_size))
    assert output_problems(lab, workloads, result) != []


@pytest.mark.parametrize(
    ("lab", "fault", "max_tokens"),
    [
        ("gemma3", None, FEW_TOKENS),
        pytest.param("qwen3_next", None, FEW_TOKENS, marks=pytest.mark.long),
        ("gemma3", "ForgetsOneByte", FEW_TOKENS),
        pytest.param("gemma3", None, None, marks=pytest.mark.long),
        pytest.param("qwen3_next", None, None, marks=pytest.mark.long),
        pytest.param("gemma3", "ForgetsOneByte", None, marks=pytest.mark.long),
        pytest.param("qwen3_next", "ForgetsOneByte", None, marks=pytest.mark.long),
        pytest.param("gemma3", "ForgetsLastChunk", None, marks=pytest.mark.long),
        pytest.param("qwen3_next", "ForgetsLastChunk", None, marks=pytest.mark.long),
    ],
    indirect=["lab"],
)
def test_one_request_at_a_time_is_computed_alike(
    lab: Lab, tmp_path: Path, fault: str | None, max_tokens: int | None
) -> None:
    workload = one_at_a_time(1, max_tokens)
    loaded = ours(tmp_path / "kv", hybrid_chunk_size=lab.block_size)
    if fault is not None:
        loaded = _forgetting(fault, tmp_path / "kv", hybrid_chunk_size=lab.block_size)
    first, again = run_workloads(lab, [workload, workload], loaded, small=False).workloads
    assert first.cached_tokens == 0
    assert sum(request.external_cached_tokens > 0 for request in again.requests) >= 5
    differences = differences_one_at_a_time(lab, workload, again)
    assert (differences == []) == (fault is None)


@pytest.mark.parametrize("lab", QUICK_LABS, indirect=True)
def test_from_host_memory(lab: Lab, workloads: list[Workload], tmp_path: Path) -> None:
    tier = {"name": "ram", "type": "cpu", "capacity": "256MiB"}
    transfer = ours(tmp_path / "unused", hybrid_chunk_size=lab.block_size, backends=[tier])
    result = run_workloads(lab, workloads, transfer)
    check_outputs(lab, workloads, result)
    check_against_stock(lab, workloads, result)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_ten_more_seeds(lab: Lab, tmp_path: Path) -> None:
    many = [random_workload(seed) for seed in LONG_SEEDS]
    result = run_workloads(lab, many, ours(tmp_path / "kv", hybrid_chunk_size=lab.block_size))
    assert sum(item.preemptions for item in result.workloads) > 0
    check_outputs(lab, many, result)
    check_against_stock(lab, many, result)


@pytest.mark.long
def test_whatever_runs_is_preempted_every_few_steps(lab: Lab, tmp_path: Path) -> None:
    actions = [WorkloadAction(step=step, kind="preempt") for step in range(3, 120, 3)]
    many = [random_workload(seed).model_copy(update={"actions": actions}) for seed in SEEDS]
    result = run_workloads(lab, many, ours(tmp_path / "kv", hybrid_chunk_size=lab.block_size))
    for item in result.workloads:
        assert item.preemptions >= len(item.requests) // 2, "those of a few tokens end before"
    check_outputs(lab, many, result)


@pytest.mark.long
def test_two_tensor_parallel_ranks(lab: Lab, tmp_path: Path) -> None:
    many = [random_workload(seed) for seed in SEEDS]
    transfer = ours(tmp_path / "kv", hybrid_chunk_size=lab.block_size)
    result = run_workloads(lab, many, transfer, tensor_parallel_size=2)
    assert any(request.external_cached_tokens for item in result.workloads for request in item.requests)
    check_outputs(lab, many, result, tensor_parallel_size=2)


@pytest.mark.long
def test_tier_that_keeps_nothing(lab: Lab, tmp_path: Path) -> None:
    many = [random_workload(seed) for seed in SEEDS]
    transfer = ours(tmp_path / "unused")
    transfer["kv_connector_extra_config"]["backends"] = [{"name": "nothing", "type": "keeps-nothing"}]
    result = run_workloads(lab, many, transfer, env=installed(tmp_path, "keeps_nothing"))
    assert not any(request.external_cached_tokens for item in result.workloads for request in item.requests)
    check_outputs(lab, many, result)


@pytest.mark.long
def test_several_samples_of_each_prompt(gemma3: Lab, tmp_path: Path) -> None:
    # vLLM 0.32 cannot sample with a seed on CPUs where a prompt is computed in several steps or again after a
    # preemption ("CPU Generator does not use offset"): so no pressure, and not Qwen3-Next.
    many = [_changed(random_workload(seed, requests=8), samples=3) for seed in SEEDS]
    result = run_workloads(gemma3, many, ours(tmp_path / "kv", hybrid_chunk_size=gemma3.block_size), small=False)
    check_outputs(gemma3, many, result, small=False)


@pytest.mark.long
def test_cache_salt_separates_and_unites(lab: Lab, tmp_path: Path) -> None:
    requests = one_at_a_time(1).requests
    many = [
        _changed(Workload(name=name, requests=requests), cache_salt=salt)
        for name, salt in (("first", "one"), ("other salt", "two"), ("same salt", "one"))
    ]
    result = run_workloads(lab, many, ours(tmp_path / "kv", hybrid_chunk_size=lab.block_size), small=False)
    first, other, same = (item.cached_tokens for item in result.workloads)
    assert other == first, "a prefix shared within one salt only"
    assert same > first
    check_outputs(lab, many, result, small=False)


@pytest.mark.long
def test_ngram_speculation(gemma3: Lab, tmp_path: Path) -> None:
    many = [random_workload(seed) for seed in SEEDS]
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    engine: dict[str, Any] = {"extra_engine_args": {"speculative_config": speculation}}
    transfer = ours(tmp_path / "kv", hybrid_chunk_size=gemma3.block_size)
    first = run_workloads(gemma3, many, transfer, **engine)
    second = run_workloads(gemma3, many, transfer)
    assert sum(item.cached_tokens for item in second.workloads) > sum(item.cached_tokens for item in first.workloads)
    for result in (first, second):
        check_outputs(gemma3, many, result)


@pytest.mark.long
@pytest.mark.parametrize("order", ["ours first", "stock first"])
def test_beside_the_stock_connector(lab: Lab, tmp_path: Path, order: str) -> None:
    connectors = [ours(tmp_path / "kv", hybrid_chunk_size=lab.block_size), stock()]
    if order == "stock first":
        connectors.reverse()
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": connectors},
    }
    many = [random_workload(seed) for seed in SEEDS]
    result = run_workloads(lab, many, transfer)
    assert any(request.external_cached_tokens for item in result.workloads for request in item.requests)
    check_outputs(lab, many, result)


def _undisturbed(one: RunResult, two: RunResult) -> list[tuple[WorkloadResult, WorkloadResult]]:
    """Those requests only that neither run preempted and that both found in the local cache to the same depth."""
    undisturbed = []
    for pair in zip(one.workloads, two.workloads, strict=True):
        both = [
            requests
            for requests in zip(*(item.requests for item in pair), strict=True)
            if not any(request.preemptions for request in requests)
            and len({request.local_cached_tokens for request in requests}) == 1
        ]
        assert both
        first, second = (
            item.model_copy(update={"requests": list(kept)})
            for item, kept in zip(pair, zip(*both, strict=True), strict=True)
        )
        undisturbed.append((first, second))
    return undisturbed


@pytest.mark.long
def test_engine_alone_may_round_by_what_is_batched(qwen3_next: Lab, workloads: list[Workload]) -> None:
    """On some processors it always does. So no two runs under pressure can be compared token by token."""
    small, large = (alone(qwen3_next, workloads, small=size, **ROUNDING_BY_BATCH) for size in (True, False))
    assert all(item.notes["parted products"] for result in (small, large) for item in result.workloads)
    pairs = _undisturbed(small, large)
    assert [line for one, two in pairs for line in compare_workloads(one, two)] != []


@pytest.mark.long
@pytest.mark.parametrize("fault", [None, "ForgetsFirstChunk", "ForgetsFirstChunkOverOldBytes"])
def test_where_rounding_depends_on_the_batch(
    qwen3_next: Lab, workloads: list[Workload], tmp_path: Path, fault: str | None
) -> None:
    chunk = {"hybrid_chunk_size": qwen3_next.block_size}
    transfer = ours(tmp_path / "kv", **chunk) if fault is None else _forgetting(fault, tmp_path / "kv", **chunk)
    result = run_workloads(qwen3_next, workloads, transfer, **ROUNDING_BY_BATCH)
    assert any(request.external_cached_tokens for item in result.workloads for request in item.requests)
    assert (output_problems(qwen3_next, workloads, result, **ROUNDING_BY_BATCH) == []) == (fault is None)


@pytest.mark.long
def test_one_request_at_a_time_is_computed_alike_where_rounding_depends_on_the_batch(
    qwen3_next: Lab, tmp_path: Path
) -> None:
    workload = one_at_a_time(1)
    transfer = ours(tmp_path / "kv", hybrid_chunk_size=qwen3_next.block_size)
    many = [workload, workload]
    first, again = run_workloads(qwen3_next, many, transfer, small=False, **ROUNDING_BY_BATCH).workloads
    assert first.cached_tokens == 0
    assert sum(request.external_cached_tokens > 0 for request in again.requests) >= 5
    assert differences_one_at_a_time(qwen3_next, workload, again, **ROUNDING_BY_BATCH) == []
