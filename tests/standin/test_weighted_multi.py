"""Several connectors on random work, with aborts, resets and faults; every byte that is read is checked."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from tests.standin.rig import NEVER_SECONDS, Rig
from tests.standin.scripted_disk import CALLS, Script
from tests.support.standin.geometries import MODELS, StandInModel
from tests.support.standin.workload import check_outputs, make_workload, reference, repeated_work

NAMES = ["gemma3", "qwen3_next", "deepseek_v4"]
SOON: dict[str, Any] = {"lookup_timeout_seconds": "100ms", "lookup_grace_seconds": "50ms"}


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest) -> StandInModel:
    return MODELS[request.param]()


def ours(rig: Rig, model: StandInModel, name: str, load_weight: float = 1.0) -> dict[str, Any]:
    """Our connector with one tier, which is not named as the connector is: their counts have names of one form."""
    settings = rig.settings(model, {"backends": [rig.scripted_disk(f"disk-{name}")]})
    return {
        "name": name,
        "load_weight": load_weight,
        "kv_connector": "HybridOffloadConnector",
        "kv_connector_module_path": "offload_core.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"load_when": "always", **settings},
    }


def beside_memory(rig: Rig, model: StandInModel) -> list[dict[str, Any]]:
    """A connector with a disk, and a preferred one with a tier in memory."""
    disk, memory = ours(rig, model, "a"), ours(rig, model, "b", load_weight=2)
    memory["kv_connector_extra_config"]["backends"] = [{"name": "ram", "type": "cpu", "capacity": "64MiB"}]
    return [disk, memory]


def misbehaving(name: str) -> dict[str, Any]:
    return {
        "kv_connector": name,
        "kv_connector_module_path": "tests.support.engine.misbehaving",
        "kv_role": "kv_both",
    }


def counted(engine: Any, name: str, connector: str) -> float:
    return float(engine.counters[f"{name}|{connector}"])


def check_counts(engine: Any, *connectors: str) -> None:
    for connector in connectors:
        queries, hits, misses = (counted(engine, name, connector) for name in ("queries", "query_hits", "query_misses"))
        assert queries == hits + misses > 0, connector
        assert engine._gauges[f"pending_loads|{connector}"] == 0


def test_the_weights_decide(rig: Rig, model: StandInModel) -> None:
    prompt = [3 + i % 997 for i in range(2 * model.chunk_tokens + 5)]
    for weights in ((1, 4), (4, 1), (2, 2)):
        a, b = (ours(rig, model, name, weight) for name, weight in zip("ab", weights, strict=True))
        engine = rig.engine_of_several(model, [a, b], lookup_grace_seconds=NEVER_SECONDS)
        if weights == (1, 4):
            rig.run(engine, prompt)
            rig.end(engine)
            engine = rig.engine_of_several(model, [a, b], lookup_grace_seconds=NEVER_SECONDS)
        (request,) = rig.run(engine, prompt)
        served = engine.served[request].external_tokens
        assert served >= model.chunk_tokens
        loads, other = ("b", "a") if weights == (1, 4) else ("a", "b")
        assert counted(engine, "hit_tokens", loads) == served
        assert counted(engine, "hit_tokens", other) == 0
        assert counted(engine, "query_hits", other) >= 1, "it was asked, and would have served"
        check_counts(engine, "a", "b")
        rig.end(engine)


def test_random_work(rig: Rig, model: StandInModel) -> None:
    """Ours have faults, one connector never decides, and one raises errors."""
    offers = 0.0
    for life in range(2):
        work = make_workload(model, 1, requests=16, aborts=6, resets=4 * life)
        script = Script(life, hold_steps=dict.fromkeys(CALLS, 3))
        script.fail, script.damage, script.miss = {"load_into": 0.05}, 0.05, 0.05
        connectors = [
            ours(rig, model, "a"),
            misbehaving("NeverDecides"),
            misbehaving("RaisesErrors"),
            ours(rig, model, "b", load_weight=2),
        ]
        pauses = {"breaker_pause_seconds": "20ms", "breaker_max_pause_seconds": "20ms"}
        engine = rig.engine_of_several(model, connectors, script, **pauses, **SOON)
        check_outputs(engine, rig.drive(engine, work))
        offers += counted(engine, "query_hits", "a") + counted(engine, "query_hits", "b")
        check_counts(engine, "a", "b", "NeverDecides", "RaisesErrors")
        assert counted(engine, "query_hits", "NeverDecides") == counted(engine, "query_hits", "RaisesErrors") == 0
        assert counted(engine, "query_errors", "RaisesErrors") > 0
        assert counted(engine, "query_timeouts", "NeverDecides") > 0
        rig.end(engine)
    assert offers > 0


def test_loads_within_the_step_from_memory_beside_another_connector(rig: Rig, model: StandInModel) -> None:
    prompt = [3 + i % 997 for i in range(2 * model.chunk_tokens + 5)]
    engine = rig.engine_of_several(model, beside_memory(rig, model), lookup_grace_seconds=NEVER_SECONDS)
    rig.run(engine, prompt)
    assert {rig.run_again(engine, prompt) for _ in range(3)} == {2 * model.chunk_tokens}
    assert engine.counters["loads_within_step|ram"] == 2, "all but the first, which keeps the objects at hand"
    assert counted(engine, "hit_tokens", "b") == 3 * 2 * model.chunk_tokens


def test_random_work_with_objects_kept_at_hand(rig: Rig, model: StandInModel) -> None:
    counters: Counter[str] = Counter()
    for seed in range(4):
        engine = rig.engine_of_several(model, beside_memory(rig, model), **SOON)
        check_outputs(engine, rig.drive(engine, repeated_work(model, seed)))
        counters += engine.counters
        rig.end(engine)
    assert counters["loads_within_step|ram"] > 10, counters


@pytest.mark.parametrize(("policy", "end"), [("recompute", "length"), ("fail", "error")])
def test_stock_multi_connector_recomputes_only_if_its_own_policy_says_so(
    rig: Rig, caplog: pytest.LogCaptureFixture, policy: str, end: str
) -> None:
    model = MODELS["gemma3"]()
    prompt = [3 + i % 997 for i in range(2 * model.chunk_tokens + 5)]
    entry = ours(rig, model, "a")
    del entry["name"], entry["load_weight"]  # keys of WeightedMultiConnector alone
    stock: dict[str, Any] = {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": None,
        "kv_connector_extra_config": {"connectors": [entry]},
        "kv_load_failure_policy": policy,
    }
    with caplog.at_level(logging.INFO, "offload_core"):
        first = rig.engine(model, **stock)
    assert "Behind vLLM's MultiConnector this has no effect: set it in MultiConnector's own entry" in caplog.text
    rig.run(first, prompt)
    rig.end(first)
    damaged = list((rig.kv.parent / "disk-a").rglob("*.kv"))
    assert damaged
    for path in damaged:
        path.write_bytes(b"damaged")

    engine = rig.engine(model, **stock)
    request = engine.add(prompt, 4)
    rig.step_until(engine, lambda: request in engine.finished)
    rig.drain(engine)
    assert engine.counters["load_corrupt|disk-a"] > 0
    assert engine.finished[request] == end
    assert engine.outputs[request] == (reference(tuple(prompt), 4) if end == "length" else [])


def test_a_recomputed_request_counts_at_the_connector_whose_load_has_failed(rig: Rig) -> None:
    model = MODELS["gemma3"]()
    prompt = [3 + i % 997 for i in range(2 * model.chunk_tokens + 5)]
    connectors = [ours(rig, model, name, weight) for name, weight in (("a", 4.0), ("b", 1.0), ("c", 1.0))]
    engine = rig.engine_of_several(model, connectors)
    rig.run(engine, prompt)
    assert engine.scheduler.reset_prefix_cache()
    rig.script.damage = 1.0
    rig.run(engine, prompt)
    failed = sum(engine.counters[f"jobs_failed|disk-{name}"] for name in "abc")
    assert engine.counters["recomputed_requests|all"] == failed > 0


def test_a_failed_load_that_waits_for_another_adapter_holds_nobody_up(rig: Rig, adapters: list[LoRARequest]) -> None:
    model = MODELS["mla"]()
    prompts = [[3 + (i + family) % 997 for i in range(2 * model.chunk_tokens + 5)] for family in (0, 500)]
    engine = rig.engine(
        model,
        kv_connector="WeightedMultiConnector",
        kv_connector_extra_config={"connectors": [ours(rig, model, "a")], "lookup_timeout_seconds": NEVER_SECONDS},
        enable_lora=True,
        max_loras=1,
    )
    first = engine.add(prompts[0], 1, lora_request=adapters[0])
    rig.step_until(engine, lambda: first in engine.finished, max_steps=20_000)
    rig.run(engine, prompts[1])
    assert engine.scheduler.reset_prefix_cache()
    rig.script.damage = 1.0
    rig.script.hold_steps["load_into"] = 0
    rig.script.shut.add("load_into")
    failed = engine.add(prompts[0], 1, lora_request=adapters[0])
    rig.step_until(engine, lambda: rig.script.held["load_into"], max_steps=20_000)
    running = engine.add([5] * 10, 1500, lora_request=adapters[1])
    rig.step_until(engine, lambda: engine.states()[running] == "RUNNING", max_steps=20_000)
    rig.open()
    rig.step_until(engine, lambda: engine.states()[failed] == "WAITING")
    rig.script.damage = 0.0
    other = engine.add(prompts[1], 1)
    rig.step_until(engine, lambda: other in engine.finished)
    assert engine.served[other].external_tokens == 2 * model.chunk_tokens
    assert (engine.states()[failed], engine.states()[running]) == ("WAITING", "RUNNING")
    engine.abort(running)
    rig.step_until(engine, lambda: failed in engine.finished)
    assert engine.outputs[failed] == reference(tuple(prompts[0]), 1)
    rig.drain(engine)
