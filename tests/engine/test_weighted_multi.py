"""Several connectors behind one, on the real engine: ours, stock's, and some that misbehave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.workloads import SEEDS, check_outputs, run_workloads
from tests.support.engine.lab import Lab, ours, stock
from tests.support.engine.spec import Round, RunFailedError, RunResult
from tests.support.workload import random_workload

MISBEHAVING = "tests.support.engine.misbehaving"


def several(*connectors: dict[str, Any], **limits: Any) -> dict[str, Any]:
    return {
        "kv_connector": "WeightedMultiConnector",
        "kv_connector_module_path": "offload_core.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors), **limits},
    }


def on_disk(lab: Lab, folder: Path, name: str, **keys: Any) -> dict[str, Any]:
    """Our connector with one tier of the connector's name."""
    tier = {"name": name, "type": "disk", "path": str(folder / name)}
    return ours(folder, hybrid_chunk_size=lab.block_size, backends=[tier]) | {"name": name, **keys}


def misbehaving(kind: str) -> dict[str, Any]:
    return {"kv_connector": kind, "kv_connector_module_path": MISBEHAVING, "kv_role": "kv_both"}


def counted(result: RunResult, name: str, connector: str) -> int:
    suffix = "" if name == "pending_loads" else "_total"
    return int(result.metrics.get(f'vllm:weighted_multi_{name}{suffix}{{connector="{connector}"}}', 0))


@pytest.mark.long  # the stand-in runs random work with several connectors in seconds
def test_beside_connectors_that_misbehave(lab: Lab, tmp_path: Path) -> None:
    """Loads that fail are taken from another connector or recomputed, and no connector keeps the others waiting."""
    fails = on_disk(lab, tmp_path, "fails", load_weight=4) | misbehaving("FailsLoads")
    transfer = several(
        on_disk(lab, tmp_path, "disk"),
        fails,
        stock() | {"name": "stock", "load_weight": 2},
        misbehaving("NeverDecides"),
        misbehaving("RaisesErrors"),
        lookup_timeout_seconds="200ms",
        lookup_grace_seconds="50ms",
        breaker_pause_seconds="60s",
    )
    workloads = [random_workload(seed) for seed in SEEDS]
    result = run_workloads(lab, workloads, transfer)
    check_outputs(lab, workloads, result)
    assert any(request.external_cached_tokens for item in result.workloads for request in item.requests)
    for name in ("disk", "fails", "stock", "NeverDecides", "RaisesErrors"):
        queries, hits, misses = (counted(result, one, name) for one in ("queries", "query_hits", "query_misses"))
        assert queries == hits + misses > 0, name
        assert counted(result, "pending_loads", name) == 0
        assert (hits > 0) == (name in ("disk", "fails", "stock")), name
    assert counted(result, "load_failures", "fails") > 0
    assert counted(result, "hit_tokens", "fails") > 0
    timeouts, queries = (counted(result, name, "NeverDecides") for name in ("query_timeouts", "queries"))
    assert 0 < timeouts < queries / 2, "after five of them it gets a pause"


@pytest.mark.long
def test_the_stock_connector_serves_if_it_has_the_weight(lab: Lab, tmp_path: Path) -> None:
    transfer = several(on_disk(lab, tmp_path, "disk"), stock() | {"name": "stock", "load_weight": 4})
    workloads = [random_workload(seed) for seed in SEEDS]
    result = run_workloads(lab, workloads, transfer)
    check_outputs(lab, workloads, result)
    assert counted(result, "hit_tokens", "stock") > 0


@pytest.mark.long
def test_the_weights_decide_which_disk_serves(lab: Lab, tmp_path: Path) -> None:
    for fast, slow in (("a", "b"), ("b", "a")):
        weights = {fast: 4, slow: 1}
        transfer = several(
            *(on_disk(lab, tmp_path, name, load_weight=weights[name]) for name in "ab"), lookup_grace_seconds="30s"
        )
        rounds = lab.standard()
        result = lab.run(rounds, transfer)
        if fast == "b":  # the second engine
            assert counted(result, "hit_tokens", fast) > 0
            assert counted(result, "query_hits", slow) > 0
            assert counted(result, "hit_tokens", slow) == 0


def test_a_connector_without_hybrid_support_is_refused_by_name(gemma3: Lab, tmp_path: Path) -> None:
    transfer = several(on_disk(gemma3, tmp_path, "disk"), misbehaving("WithoutHybridSupport"))
    rounds = [Round(name="never", prompts=gemma3.prompts(20))]
    with pytest.raises(RunFailedError, match=r"connectors\.1: 'WithoutHybridSupport' .*cannot serve hybrid models"):
        gemma3.run(rounds, transfer)
