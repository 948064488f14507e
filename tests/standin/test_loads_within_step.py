"""Loads within the step: a request whose objects are kept at hand runs in the step that first looks at it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.standin.rig import Rig
from tests.support.standin.engine import StandInEngine
from tests.support.standin.geometries import MODELS, StandInModel
from tests.support.standin.workload import reference, repeated_work

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


def _random_work(rig: Rig, model: StandInModel, ranks: Sequence[int]) -> Counter[str]:
    """Run work on an engine for each number of ranks, and return the sums of their counters."""
    counters: Counter[str] = Counter()
    for seed, number in enumerate(ranks):
        engine = rig.engine(model, backends=[RAM], async_scheduling=bool(seed % 2), ranks=number)
        rig.drive(engine, repeated_work(model, seed))
        counters += engine.counters
        rig.end(engine)
    return counters


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
def test_random_work_with_aborts_resets_and_preemptions(rig: Rig, name: str) -> None:
    counters = _random_work(rig, MODELS[name](), ranks=(1, 1, 2, 2))
    assert counters["loads_within_step|ram"] > 10, counters


def _run_with_few_free_blocks(rig: Rig, engine: StandInEngine, prompt: list[int], free_blocks: int) -> str:
    """Run a prompt that has left the prefix cache; others hold all but ``free_blocks`` blocks for three steps."""
    assert engine.scheduler.reset_prefix_cache()
    pool = engine.scheduler.kv_cache_manager.block_pool
    others = pool.get_new_blocks(pool.get_num_free_blocks() - free_blocks)
    request = engine.add(prompt, 4)
    for _ in range(3):
        engine.step()
        rig.tick()
    pool.free_blocks(others)
    rig.drain(engine)
    return request


@pytest.mark.parametrize("free_blocks", range(5, 20))
def test_a_load_within_the_step_leaves_room_for_the_states_to_go_on(rig: Rig, free_blocks: int) -> None:
    """vLLM expects one block per group of states, and such a request takes two: without it the engine would end."""
    model = MODELS["qwen3_next"]()
    prompt = list(range(3, 3 + 2 * model.chunk_tokens + 5))
    engine = rig.engine(model, backends=[RAM])
    rig.run(engine, prompt)
    assert rig.run_again(engine, prompt) > 0
    request = _run_with_few_free_blocks(rig, engine, prompt, free_blocks)
    assert engine.outputs[request] == reference(tuple(prompt), 4)
    assert engine.served[request].external_tokens == 2 * model.chunk_tokens


def test_states_are_loaded_within_the_step_if_the_whole_prompt_has_room(rig: Rig) -> None:
    model = MODELS["qwen3_next"]()
    prompt = list(range(3, 3 + 2 * model.chunk_tokens + 5))
    engine = rig.engine(model, backends=[RAM])
    rig.run(engine, prompt)
    assert rig.run_again(engine, prompt) > 0
    limit = 4 * (3 + 3)  # each of the four groups: three blocks for the tokens, and three more
    _run_with_few_free_blocks(rig, engine, prompt, limit - 1)
    assert engine.counters["loads_within_step|ram"] == 0
    _run_with_few_free_blocks(rig, engine, prompt, limit)
    assert engine.counters["loads_within_step|ram"] == 1


@pytest.mark.parametrize("num_blocks", [18, 24])
def test_random_work_in_a_cache_that_is_almost_full(rig: Rig, num_blocks: int) -> None:
    """With fewer than 28 blocks, loads within the step without regard to free blocks end the engine."""
    counters = _random_work(rig, replace(MODELS["qwen3_next"](), num_blocks=num_blocks), ranks=(1, 1, 1, 1))
    assert counters["load_hits|ram"] > 50, counters
