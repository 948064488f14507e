"""Loads within the step: a request whose objects are kept at hand runs in the step that first looks at it."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.standin.rig import Rig
from tests.support.standin.engine import StandInEngine
from tests.support.standin.geometries import MODELS, StandInModel
from tests.support.standin.workload import Arrival, Workload, reference

RAM = {"name": "ram", "type": "cpu", "capacity": "64MiB"}


def run_again(rig: Rig, engine: StandInEngine, prompt: list[int]) -> int:
    """Run a prompt that has left the prefix cache; return the number of its tokens that were loaded."""
    assert engine.scheduler.reset_prefix_cache()
    (request,) = rig.run(engine, prompt)
    assert engine.outputs[request] == reference(tuple(prompt), 4)
    return engine.served[request].external_tokens


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_the_second_load_of_a_prefix_takes_place_within_the_step(rig: Rig, name: str, ranks: int) -> None:
    model = MODELS[name]()
    boundary = 2 * model.chunk_tokens
    prompt = [3 + i % 997 for i in range(boundary + 5)]
    engine = rig.engine(model, backends=[RAM], ranks=ranks)
    rig.run(engine, prompt)
    assert run_again(rig, engine, prompt) == boundary
    assert engine.counters["loads_within_step|ram"] == 0
    loaded = engine.counters["load_hits|ram"]

    assert run_again(rig, engine, prompt) == boundary
    assert engine.counters["loads_within_step|ram"] == 1
    assert engine.counters["load_kept|ram"] == loaded == engine.counters["load_hits|ram"]


def test_a_tier_that_does_not_lend_never_loads_within_the_step(rig: Rig) -> None:
    model = MODELS["gemma3"]()
    prompt = list(range(3, 3 + 2 * model.chunk_tokens + 5))
    engine = rig.engine(model)
    rig.run(engine, prompt)
    for _ in range(2):
        assert run_again(rig, engine, prompt) == 2 * model.chunk_tokens
    assert engine.counters["loads_within_step|disk"] == 0


def test_a_budget_of_zero_turns_loads_within_the_step_off(rig: Rig) -> None:
    model = MODELS["gemma3"]()
    prompt = list(range(3, 3 + 2 * model.chunk_tokens + 5))
    engine = rig.engine(model, backends=[RAM], sync_load_budget_bytes=0)
    rig.run(engine, prompt)
    for _ in range(2):
        assert run_again(rig, engine, prompt) == 2 * model.chunk_tokens
    assert engine.counters["loads_within_step|ram"] == 0


def test_a_reset_between_two_loads_gives_the_objects_back(rig: Rig) -> None:
    model = MODELS["qwen3_next"]()
    prompt = list(range(3, 3 + 2 * model.chunk_tokens + 5))
    engine = rig.engine(model, backends=[RAM])
    rig.run(engine, prompt)
    assert run_again(rig, engine, prompt) > 0
    assert engine.reset_prefix_cache(running=False, connector=True)
    (request,) = rig.run(engine, prompt)  # the bytes of all prefixes are others now, and the runner checks them
    assert engine.served[request].external_tokens == 0
    assert engine.counters["loads_within_step|ram"] == 0


def repeated_work(model: StandInModel, seed: int) -> Workload:
    """A few prompts again and again, under aborts and resets; most of these preempt and leave the tiers alone."""
    rng = random.Random(f"again/{seed}")
    lengths = [model.chunk_tokens * chunks + rng.randint(1, 9) for chunks in (1, 2, 2)]
    prompts = [tuple(rng.randrange(3, 1024) for _ in range(length)) for length in lengths]
    arrivals = [Arrival(rng.randrange(150), rng.choice(prompts), rng.choice((1, 4, 12))) for _ in range(30)]
    resets = {rng.randrange(150): (rng.random() < 0.7, rng.random() < 0.1) for _ in range(30)}
    aborts = frozenset(rng.randrange(150) for _ in range(12))
    return Workload(seed, tuple(sorted(arrivals, key=lambda arrival: arrival.step)), aborts, resets)


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
