"""Loads within the step: a request whose objects are kept at hand runs in the step that first looks at it."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.standin.rig import Rig
from tests.support.standin.geometries import MODELS
from tests.support.standin.workload import repeated_work

RAM = {"name": "ram", "type": "cpu", "capacity": "64MiB"}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_the_second_load_of_a_prefix_takes_place_within_the_step(rig: Rig, name: str, ranks: int) -> None:
    model = MODELS[name]()
    boundary = 2 * model.chunk_tokens
    prompt = [3 + i % 997 for i in range(boundary + 5)]
    engine = rig.engine(model, backends=[RAM], ranks=ranks)
    rig.run(engine, prompt)
    assert rig.run_again(engine, prompt) == boundary
    assert engine.counters["loads_within_step|ram"] == 0
    loaded = engine.counters["load_hits|ram"]

    assert rig.run_again(engine, prompt) == boundary
    assert engine.counters["loads_within_step|ram"] == 1
    assert engine.counters["load_kept|ram"] == loaded == engine.counters["load_hits|ram"]


def test_a_tier_that_does_not_lend_never_loads_within_the_step(rig: Rig) -> None:
    model = MODELS["gemma3"]()
    prompt = list(range(3, 3 + 2 * model.chunk_tokens + 5))
    engine = rig.engine(model)
    rig.run(engine, prompt)
    for _ in range(2):
        assert rig.run_again(engine, prompt) == 2 * model.chunk_tokens
    assert engine.counters["loads_within_step|disk"] == 0


def test_a_budget_of_zero_turns_loads_within_the_step_off(rig: Rig) -> None:
    model = MODELS["gemma3"]()
    prompt = list(range(3, 3 + 2 * model.chunk_tokens + 5))
    engine = rig.engine(model, backends=[RAM], sync_load_budget_bytes=0)
    rig.run(engine, prompt)
    for _ in range(2):
        assert rig.run_again(engine, prompt) == 2 * model.chunk_tokens
    assert engine.counters["loads_within_step|ram"] == 0


def test_a_reset_between_two_loads_gives_the_objects_back(rig: Rig) -> None:
    model = MODELS["qwen3_next"]()
    prompt = list(range(3, 3 + 2 * model.chunk_tokens + 5))
    engine = rig.engine(model, backends=[RAM])
    rig.run(engine, prompt)
    assert rig.run_again(engine, prompt) > 0
    assert engine.reset_prefix_cache(running=False, connector=True)
    (request,) = rig.run(engine, prompt)  # the bytes of all prefixes are others now, and the runner checks them
    assert engine.served[request].external_tokens == 0
    assert engine.counters["loads_within_step|ram"] == 0


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
def test_random_work_with_aborts_resets_and_preemptions(rig: Rig, name: str) -> None:
    model = MODELS[name]()
    counters: Counter[str] = Counter()
    for seed in range(4):
        engine = rig.engine(model, backends=[RAM], async_scheduling=bool(seed % 2), ranks=1 + seed // 2)
        rig.drive(engine, repeated_work(model, seed))
        counters += engine.counters
        rig.end(engine)
    assert counters["loads_within_step|ram"] > 10, counters
