"""Sleep mode: the KV cache loses its memory and gets other memory, while loads and stores are under way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offload_core.api.errors import UnsupportedLayoutError
from offload_core.vllm import HybridOffloadConnector
from offload_core.vllm.scheduler.half import SchedulerHalf
from tests.standin.rig import Rig
from tests.standin.scripted_disk import Script
from tests.standin.test_faults import external, loading, prompt, stored
from tests.support.standin.cache import WrongBytesError
from tests.support.standin.engine import StandInEngine
from tests.support.standin.geometries import MODELS, StandInModel
from tests.support.standin.workload import Arrival, check_outputs, make_workload, reference

NAMES = ["gemma3", "qwen3_next", pytest.param("deepseek_v4", marks=pytest.mark.long)]


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest) -> StandInModel:
    return MODELS[request.param]()


@pytest.fixture
def small() -> StandInModel:
    return MODELS["qwen3_next"]()


def sleep(rig: Rig, engine: StandInEngine, level: int, *, moved: bool = False) -> None:
    """Let an engine without loads sleep for a few steps of the I/O."""
    assert engine.sleep(level)
    for _ in range(3):
        rig.tick()
    engine.wake_up(moved=moved)


def drive_with_sleeps(rig: Rig, model: StandInModel, *, ranks: int = 1, asynchronous: bool = False) -> None:
    """Run random work with aborts and sleeps of both levels, while calls of the disk are held."""
    work = make_workload(model, 5, requests=30, aborts=4)
    last = work.arrivals[-1].step
    sleeps = {last // 4: (1, True), last // 2: (2, True), last * 3 // 4: (1, False)}
    local_resets = dict.fromkeys(range(0, last, 20), (False, False))  # so that the disk serves what was stored
    script = Script(5, hold_steps={"contains": 2, "load_into": 6, "store": 6})
    engine = rig.engine(model, script, ranks=ranks, async_scheduling=asynchronous)
    asked = rig.drive(engine, replace(work, resets=local_resets, sleeps=sleeps))
    assert engine.sleeps == len(sleeps)
    late = list(asked)[-len(asked) // 3 :]
    assert sum(external(engine, request) for request in late if request in engine.served) > 0


@pytest.mark.parametrize(
    ("model", "ranks", "asynchronous"),
    [("gemma3", 1, False), ("qwen3_next", 2, True), pytest.param("deepseek_v4", 1, True, marks=pytest.mark.long)],
    indirect=["model"],
)
def test_sleeps_under_load(rig: Rig, model: StandInModel, ranks: int, asynchronous: bool) -> None:
    drive_with_sleeps(rig, model, ranks=ranks, asynchronous=asynchronous)


@pytest.mark.parametrize(
    ("owner", "methods"),
    [(HybridOffloadConnector, ("unregister_kv_caches", "restore_kv_caches")), (SchedulerHalf, ("reset",))],
    ids=["keeps its views", "forgets nothing"],
)
def test_a_connector_without_the_contract_is_seen(
    rig: Rig, model: StandInModel, monkeypatch: pytest.MonkeyPatch, owner: type, methods: tuple[str, ...]
) -> None:
    for method in methods:
        monkeypatch.setattr(owner, method, lambda self: None)
    with pytest.raises(WrongBytesError):
        drive_with_sleeps(rig, model)


@pytest.mark.parametrize("moved", [False, True])
def test_it_stores_and_loads_after_a_sleep(rig: Rig, model: StandInModel, moved: bool) -> None:
    engine = rig.engine(model)
    rig.run(engine, prompt(model))
    sleep(rig, engine, 1, moved=moved)

    (computed,) = rig.run(engine, prompt(model))
    assert external(engine, computed) == 0
    assert engine.reset_prefix_cache(running=False, connector=False)
    (loaded,) = rig.run(engine, prompt(model))
    assert external(engine, loaded) == 2 * model.chunk_tokens
    assert engine.outputs[loaded] == reference(tuple(prompt(model)), 4)


def test_nothing_of_old_weights_is_served_after_level_2(rig: Rig, model: StandInModel) -> None:
    engine = rig.engine(model, Script(0, shut={"store"}))
    before = engine.add(prompt(model), 40)
    rig.step_until(engine, lambda: engine.outputs[before] and rig.script.held["store"])

    sleep(rig, engine, 2)
    rig.open()
    rig.drain(engine)
    check_outputs(engine, {before: Arrival(0, tuple(prompt(model)), 40)})
    assert engine.reset_prefix_cache(running=False, connector=False)
    (again,) = rig.run(engine, prompt(model))
    assert external(engine, again) == 2 * model.chunk_tokens, "stored with the new weights"


def test_ranks_that_report_again_have_new_objects(rig: Rig, model: StandInModel) -> None:
    """Some programs let the workers sleep themselves: then nobody resets the connector's cache."""
    engine = rig.engine(model)
    rig.run(engine, prompt(model))
    assert engine.reset_prefix_cache(running=True, connector=False)
    engine.take_memory()
    engine.wake_up()
    (again,) = rig.run(engine, prompt(model))
    assert external(engine, again) == 0


def test_a_load_under_way_is_computed_instead(rig: Rig, model: StandInModel) -> None:
    """vLLM waits for loads before it sleeps. Even if it did not, no late byte would enter."""
    stored(rig, model)
    engine = rig.engine(model, Script(0, shut={"load_into"}))
    request = loading(rig, engine)

    engine.take_memory()
    rig.open("load_into")
    rig.tick()
    engine.wake_up()
    rig.drain(engine)

    assert engine.outputs[request] == reference(tuple(prompt(model)), 4)
    assert engine.counters["jobs_cancelled|disk"] == 1
    assert engine.counters["load_late|disk"] > 0
    assert external(engine, request) == 0


def test_an_engine_on_a_lending_tier_sleeps(rig: Rig, small: StandInModel) -> None:
    """Memory that a tier lends belongs to the tier and outlives the KV cache."""
    engine = rig.engine(small, backends=[{"name": "ram", "type": "cpu", "capacity": "64MiB"}])
    rig.run(engine, prompt(small))
    sleep(rig, engine, 1, moved=True)
    rig.run(engine, prompt(small))
    assert engine.reset_prefix_cache(running=False, connector=False)
    (loaded,) = rig.run(engine, prompt(small))
    assert external(engine, loaded) == 2 * small.chunk_tokens


def test_both_calls_may_come_twice(rig: Rig, small: StandInModel) -> None:
    engine = rig.engine(small)
    (connector,) = (worker.connector for worker in engine.workers)
    assert connector is not None
    connector.restore_kv_caches()
    rig.run(engine, prompt(small))
    for _ in range(2):
        connector.unregister_kv_caches()
    for _ in range(2):
        connector.restore_kv_caches()
    assert engine.reset_prefix_cache(running=False, connector=False)
    (loaded,) = rig.run(engine, prompt(small))
    assert external(engine, loaded) == 2 * small.chunk_tokens


def test_the_caches_may_be_registered_again(rig: Rig, small: StandInModel) -> None:
    engine = rig.engine(small)
    rig.run(engine, prompt(small))
    assert engine.reset_prefix_cache(running=False, connector=False)
    for worker in engine.workers:
        assert worker.connector is not None
        worker.cache.sleep()
        worker.cache.wake_up(moved=True)
        worker.connector.register_kv_caches(worker.cache.tensors)
    (loaded,) = rig.run(engine, prompt(small))
    assert external(engine, loaded) == 2 * small.chunk_tokens


def test_tensors_of_another_layout_are_refused(rig: Rig, small: StandInModel) -> None:
    engine = rig.engine(small)
    (worker,) = engine.workers
    assert worker.connector is not None
    worker.connector.unregister_kv_caches()
    worker.connector._worker_half.layout = {"layers": {}}
    with pytest.raises(UnsupportedLayoutError, match=r"has come back with the layout .* Restart the engine"):
        worker.connector.restore_kv_caches()


def test_announced_stores_are_dropped(rig: Rig) -> None:
    """A store is announced before a step and copied after it. If memory went in between, it would copy other bytes."""
    model = MODELS["gemma3"]()
    engine = rig.engine(model)
    (worker,) = engine.workers
    connector = worker.connector
    assert connector is not None
    save = connector.wait_for_save

    def sleep_and_save() -> None:
        connector.unregister_kv_caches()
        worker.cache.sleep()
        worker.cache.wake_up(moved=False)
        connector.restore_kv_caches()
        save()

    connector.wait_for_save = sleep_and_save
    rig.run(engine, prompt(model)[: model.chunk_tokens + 1], max_tokens=1)
    assert engine.counters["store_dropped|disk"] > 0
    assert not list(rig.kv.rglob("*.kv"))


def test_an_engine_that_sleeps_ends(rig: Rig, small: StandInModel) -> None:
    engine = rig.engine(small)
    rig.run(engine, prompt(small))
    assert engine.sleep(1)
    rig.end(engine)
