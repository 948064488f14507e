"""Random workloads under pressure on a tier that is sick in every way, by a seeded script of faults.

Whatever storage does, the outputs are those without offloading, no request waits longer than its deadlines allow,
and once the faults are over nothing is left of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offload_core.testing.faults.plugin import ALLOWANCE_SECONDS, DEADLINE_SECONDS, JOURNAL_VARIABLE, TIER_KEYS
from offload_core.testing.faults.script import FAULT_KINDS
from tests.engine.labs import QUICK_LABS
from tests.engine.workloads import SEEDS, check_outputs, run_workloads
from tests.support.engine.lab import Lab, installed, ours
from tests.support.engine.spec import RunResult
from tests.support.steadiness import counter_problems, wait_problems
from tests.support.workload import Workload, random_workload

# Each workload runs once more under other faults, when there is something on the tier from the start. In short these
# are the two of other tests, whose outputs are known already.
IN_SHORT = [(seed, f"{again} {seed}") for again in ("first", "again") for seed in SEEDS]


def _faulted(seed: int, fault_seed: int | str) -> Workload:
    return random_workload(seed).model_copy(update={"fault_seed": fault_seed})


def _run(lab: Lab, folder: Path, workloads: list[Workload]) -> RunResult:
    """Run the workloads under faults on an engine with one disk, and before and after them one without faults."""
    tier = {"name": "disk", "type": "disk", "path": str(folder / "kv"), **TIER_KEYS}
    transfer = ours(folder, hybrid_chunk_size=lab.block_size, load_timeout_seconds_per_mib=0, backends=[tier])
    transfer |= {
        "kv_connector": "WaitingConnector",
        "kv_connector_module_path": "tests.support.engine.waiting",
    }
    result = run_workloads(
        lab,
        [random_workload(-1, requests=6), *workloads, random_workload(-2, requests=6)],
        transfer,
        env={**installed(folder, "plugin", "offload_core.testing.faults"), JOURNAL_VARIABLE: str(folder / "journal")},
        around_workloads="tests.support.engine.fault_run:under_faults",
    )
    return result.model_copy(update={"workloads": result.workloads[1:-1]})


@pytest.fixture(scope="module")
def workloads() -> list[Workload]:
    return [_faulted(*seeds) for seeds in IN_SHORT]


@pytest.fixture(scope="module")
def sick(lab: Lab, workloads: list[Workload], tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return _run(lab, tmp_path_factory.mktemp(f"sick-{lab.name}"), workloads)


@pytest.mark.parametrize("lab", QUICK_LABS, indirect=True)
def test_outputs_are_those_without_offloading(lab: Lab, workloads: list[Workload], sick: RunResult) -> None:
    check_outputs(lab, workloads, sick)


@pytest.mark.parametrize("lab", QUICK_LABS, indirect=True)
def test_every_kind_of_fault_has_happened_and_tokens_are_served_all_the_same(lab: Lab, sick: RunResult) -> None:
    assert sick.workloads[-1].notes["injected"].keys() == FAULT_KINDS.keys()
    assert _served_tokens(sick) > 0


@pytest.mark.parametrize("lab", QUICK_LABS, indirect=True)
def test_no_request_waits_longer_than_its_deadlines_allow(lab: Lab, sick: RunResult) -> None:
    assert _waited_too_long(sick) == []


@pytest.mark.parametrize("lab", QUICK_LABS, indirect=True)
def test_nothing_is_left_of_the_faults_and_every_job_has_ended_once(lab: Lab, sick: RunResult) -> None:
    assert _left(sick) == {}
    assert counter_problems(sick.metrics) == []


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", [101, 106, 111, 116])
def test_five_more_seeds(lab: Lab, tmp_path: Path, first: int) -> None:
    many = [_faulted(seed, f"{again} {seed}") for again in ("first", "again") for seed in range(first, first + 5)]
    result = _run(lab, tmp_path, many)
    check_outputs(lab, many, result)
    assert result.workloads[-1].notes["injected"].keys() == FAULT_KINDS.keys()
    assert _served_tokens(result) > 0
    assert _waited_too_long(result) == []
    assert _left(result) == {}
    assert counter_problems(result.metrics) == []


def _served_tokens(result: RunResult) -> int:
    return sum(request.external_cached_tokens for item in result.workloads for request in item.requests)


def _waited_too_long(result: RunResult) -> list[str]:
    waits: dict[str, Any] = {}
    for number, item in enumerate(result.workloads):
        assert item.notes["waits"], "nobody waited, so nothing was measured"
        waits |= {f"{number}: {request_id}": wait for request_id, wait in item.notes["waits"].items()}
    return wait_problems(waits, 2 * DEADLINE_SECONDS, ALLOWANCE_SECONDS)


def _left(result: RunResult) -> dict[str, Any]:
    return {item.name: item.notes["left"] for item in result.workloads if item.notes["left"]}
