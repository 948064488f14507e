"""Random workloads under pressure on a tier that is sick in every way, by a seeded script.

What must hold whatever storage does: the outputs are those without offloading, no request waits longer than its
deadlines, and when the faults are over nothing is left of them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from offload_core.testing.engine import RunResult
from offload_core.testing.workload import Workload, random_workload
from offload_core.vllm.testing.fault_run import DEADLINE_SECONDS
from tests.engine.lab import Lab, installed, ours
from tests.engine.workloads import SEEDS, run_workloads

# The two workloads of other tests, whose outputs are known already, and one of them once more under other faults, when
# there is something on the tier from the start.
IN_SHORT = [(SEEDS[0], "one"), (SEEDS[1], "two"), (SEEDS[0], "three")]
LONG_SEEDS = tuple(range(101, 121))


def _transfer(lab: Lab, folder: Path) -> dict[str, Any]:
    deadlines = {"lookup_timeout_seconds": DEADLINE_SECONDS, "load_timeout_seconds": DEADLINE_SECONDS}
    transfer = ours(
        folder,
        hybrid_chunk_size=lab.block_size,
        load_timeout_seconds_per_mib=0,
        **deadlines,
    )
    return transfer | {
        "kv_connector": "WaitingConnector",
        "kv_connector_module_path": "offload_core.vllm.testing.waiting",
    }


def _run(lab: Lab, folder: Path, workloads: list[Workload]) -> RunResult:
    """Run the workloads under faults, after one without, on an engine with one disk."""
    well = random_workload(1000, requests=6).model_copy(update={"name": "without faults"})
    return run_workloads(
        lab,
        [well, *workloads],
        _transfer(lab, folder / "kv"),
        env=installed(folder, "fault_run", "offload_core.vllm.testing"),
        around_workloads="offload_core.vllm.testing.fault_run:under_faults",
    )


@pytest.fixture(scope="module")
def in_short(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    folder = tmp_path_factory.mktemp(f"faults-{lab.name}")
    result = _run(lab, folder, [random_workload(seed).model_copy(update={"fault_seed": f}) for seed, f in IN_SHORT])
    if path := os.environ.get("DEBUG_NOTES"):
        Path(f"{path}-{lab.name}.json").write_text(result.model_dump_json(indent=1))
    return result


def test_one(lab: Lab, in_short: RunResult) -> None:
    pass
