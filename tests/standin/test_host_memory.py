"""A tier in the workers' own memory: the scheduler half cannot ask it and relies on the workers' reports."""

from __future__ import annotations

from collections import Counter

import pytest

from offload_core.api.errors import ConfigError
from tests.standin.rig import Rig
from tests.standin.scripted_disk import Script
from tests.support.standin.geometries import MODELS
from tests.support.standin.workload import make_workload, reference

RAM = {"name": "ram", "type": "cpu", "capacity": "64MiB"}
TIGHT = {"name": "ram", "type": "cpu", "capacity": "2MiB"}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_that_left_the_cache_is_served_from_memory_to_the_deepest_boundary(
    rig: Rig, name: str, ranks: int
) -> None:
    model = MODELS[name]()
    boundary = 2 * model.chunk_tokens
    prompt = [3 + i % 997 for i in range(boundary + 5)]
    engine = rig.engine(model, backends=[RAM], ranks=ranks)
    rig.run(engine, prompt)
    assert engine.scheduler.reset_prefix_cache()

    (request,) = rig.run(engine, prompt)

    assert engine.served[request].external_tokens == boundary
    assert engine.outputs[request] == reference(tuple(prompt), 4)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", MODELS)
def test_random_work_under_eviction(rig: Rig, name: str, seed: int) -> None:
    model = MODELS[name]()
    engine = rig.engine(model, backends=[TIGHT], async_scheduling=bool(seed))
    rig.drive(engine, make_workload(model, seed, aborts=8, resets=4, salts=2))
    rig.end(engine)


def test_memory_and_disk_together_under_random_work(rig: Rig) -> None:
    model = MODELS["gemma3"]()
    served: Counter[str] = Counter()
    for seed in range(3):
        script = Script(seed, hold_steps={"contains": 2, "load_into": 6, "store": 6}, fail={"load_into": 0.05})
        engine = rig.engine(model, script, backends=[TIGHT, rig.scripted_disk()])
        rig.drive(engine, make_workload(model, seed, aborts=4, salts=2))
        served += engine.counters
        rig.end(engine)
    assert served


def test_an_engine_whose_tiers_never_store_says_so_and_stores_nothing(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    model = MODELS["gemma3"]()
    never = [{**RAM, "write_policy": "never"}, {**rig.scripted_disk(), "write_policy": "never"}]
    engine = rig.engine(model, backends=never)
    assert "write_policy is never for all of them, so nothing is stored" in caplog.text
    rig.run(engine, list(range(3, 3 + 2 * model.chunk_tokens + 5)))
    assert not any(name.startswith(("store", "promotion")) for name in engine.counters)
    with pytest.raises(ConfigError, match="write_policy is never for all of them"):
        rig.engine(model, backends=never, kv_role="kv_producer")


def test_what_a_tier_declines_is_offered_again_until_it_is_stored(rig: Rig) -> None:
    model = MODELS["gemma3"]()
    engine = rig.engine(model, backends=[{**rig.scripted_disk(), "write_policy": "second-touch"}])
    boundary = 2 * model.chunk_tokens
    prompt = list(range(3, 3 + boundary + 5))
    for offered in range(3):
        (request,) = rig.run(engine, prompt)
        assert engine.served[request].external_tokens == (boundary if offered == 2 else 0)
        assert any(name.startswith("stores|") for name in engine.counters) == (offered > 0), engine.counters
        assert engine.scheduler.reset_prefix_cache()
