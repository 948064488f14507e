"""Hits that end inside a block: the tails of prompts, and local hits that a tier completes."""

from __future__ import annotations

import pytest

from tests.standin.rig import Rig
from tests.standin.scripted_disk import Script
from tests.standin.test_geometries import LONG_SEEDS, slow_and_unreliable
from tests.support.standin.geometries import MODELS, StandInModel
from tests.support.standin.workload import make_workload, reference

MATCH_UNITS = {"gemma3": 32, "gpt_oss": 8, "qwen3_next": 32, "qwen3_5": 96}
"""Per model whose prompts have tails, a distance between ends that divides its blocks."""


@pytest.fixture(params=list(MATCH_UNITS))
def model(request: pytest.FixtureRequest) -> StandInModel:
    return MODELS[request.param]()


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    return [3 + (seed * 31 + i * i) % 997 for i in range(tokens)]


@pytest.mark.parametrize("ends_behind", [1, 5])
def test_a_prompt_sent_again_is_served_to_its_last_match_unit(rig: Rig, model: StandInModel, ends_behind: int) -> None:
    unit = MATCH_UNITS[model.name]
    end = 2 * model.chunk_tokens + model.chunk_tokens // unit // 2 * unit
    prompt = prompt_of(end + ends_behind)
    first = rig.engine(model, prefix_match_unit=unit)
    rig.run(first, prompt)
    rig.end(first)

    second = rig.engine(model, prefix_match_unit=unit)
    (request,) = rig.run(second, prompt)

    assert second.served[request].external_tokens == end
    assert second.outputs[request] == reference(tuple(prompt), 4)


def test_a_longer_prompt_resumes_at_the_tail_of_a_shorter_one(rig: Rig, model: StandInModel) -> None:
    unit = MATCH_UNITS[model.name]
    end = model.chunk_tokens // unit // 2 * unit
    turn = prompt_of(end + 3)
    first = rig.engine(model, prefix_match_unit=unit)
    rig.run(first, turn)
    rig.end(first)

    second = rig.engine(model, prefix_match_unit=unit)
    longer = [*turn, *prompt_of(model.chunk_tokens, seed=9)]
    (request,) = rig.run(second, longer)

    assert second.served[request].external_tokens == end, "a prompt shorter than a chunk has a tail too"
    assert second.outputs[request] == reference(tuple(longer), 4)


@pytest.mark.parametrize("lost", [0, -1])
def test_a_tail_of_which_a_part_is_gone_is_no_hit(rig: Rig, model: StandInModel, lost: int) -> None:
    unit = MATCH_UNITS[model.name]
    end = model.chunk_tokens + 2 * unit
    prompt = prompt_of(end + 1)
    first = rig.engine(model, prefix_match_unit=unit)
    rig.run(first, prompt)
    rig.end(first)
    tails = sorted(path for path in rig.kv.rglob("*.kv") if path.parent.parent.name.endswith("-tail"))
    assert len(tails) == len({path.parent.parent for path in tails}) >= 2, "one tail of each pack"
    tails[lost].unlink()

    second = rig.engine(model, prefix_match_unit=unit)
    (request,) = rig.run(second, prompt)

    assert second.served[request].external_tokens == model.chunk_tokens
    assert second.outputs[request] == reference(tuple(prompt), 4)
    assert second.counters["load_missing|disk"] == 0, "the lookup finds out, not the load"


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_a_local_hit_that_ends_inside_a_block_is_completed_from_a_tier(rig: Rig, name: str) -> None:
    model = MODELS[name]()
    unit = MATCH_UNITS[name]
    deep = 2 * model.chunk_tokens + 2 * unit
    whole = prompt_of(deep + 1)
    first = rig.engine(model, prefix_match_unit=unit)
    rig.run(first, whole)
    rig.end(first)

    second = rig.engine(model, prefix_match_unit=unit, kv_role="kv_consumer")
    shorter = whole[: model.chunk_tokens + unit + 1]
    rig.run(second, shorter)
    held = rig.run(second, shorter)[0]
    (request,) = rig.run(second, whole)

    assert second.served[held].local_tokens == model.chunk_tokens + unit, "inside the second block"
    assert second.served[request].local_tokens == model.chunk_tokens
    assert second.served[request].external_tokens == deep - model.chunk_tokens
    assert second.outputs[request] == reference(tuple(whole), 4)


def test_without_a_match_unit_prompts_have_no_tails(rig: Rig, model: StandInModel) -> None:
    engine = rig.engine(model)
    rig.run(engine, prompt_of(2 * model.chunk_tokens + model.chunk_tokens // 2))
    rig.end(engine)
    assert not [path for path in rig.kv.rglob("*") if path.name.endswith("-tail")]


@pytest.mark.parametrize("seed", [0, *LONG_SEEDS])
def test_random_work_with_tails(rig: Rig, model: StandInModel, seed: int) -> None:
    unit = MATCH_UNITS[model.name]
    work = make_workload(model, seed, salts=2)
    inside = 0
    for life in range(2):
        script = Script(seed + life, hold_steps={"contains": 2, "load_into": 6, "store": 6})
        engine = rig.engine(model, script, prefix_match_unit=unit, async_scheduling=bool(life))
        asked = rig.drive(engine, work)
        served = [engine.served[request] for request in asked if request in engine.served]
        inside += sum(
            (it.local_tokens + it.external_tokens) % model.chunk_tokens > 0 < it.external_tokens for it in served
        )
        rig.end(engine)
    assert inside > 0


@pytest.mark.parametrize("seed", [0, *LONG_SEEDS])
def test_random_work_with_tails_aborts_resets_and_an_unreliable_disk(rig: Rig, model: StandInModel, seed: int) -> None:
    work = make_workload(model, seed, aborts=8, resets=4, salts=2)
    for life in range(2):
        script = slow_and_unreliable(10 * seed + life)
        engine = rig.engine(model, script, prefix_match_unit=MATCH_UNITS[model.name], async_scheduling=bool(life))
        rig.drive(engine, work)
        rig.end(engine)


def test_the_second_load_of_a_tail_takes_place_within_the_step(rig: Rig, model: StandInModel) -> None:
    unit = MATCH_UNITS[model.name]
    end = model.chunk_tokens + model.chunk_tokens // unit // 2 * unit
    prompt = prompt_of(end + 1)
    engine = rig.engine(model, backends=[{"name": "ram", "type": "cpu", "capacity": "64MiB"}], prefix_match_unit=unit)
    rig.run(engine, prompt)
    for within_step in (0, 1):
        assert engine.scheduler.reset_prefix_cache()
        (request,) = rig.run(engine, prompt)
        assert engine.served[request].external_tokens == end
        assert engine.outputs[request] == reference(tuple(prompt), 4)
        assert engine.counters["loads_within_step|ram"] == within_step


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_a_local_hit_that_ends_inside_a_block_waits_for_no_tier_that_has_no_more(rig: Rig, name: str) -> None:
    model = MODELS[name]()
    unit = MATCH_UNITS[name]
    prompt = prompt_of(model.chunk_tokens + 2 * unit + 1)
    engine = rig.engine(model, prefix_match_unit=unit)
    rig.run(engine, prompt)
    asked = engine.counters["queries|disk"]
    (request,) = rig.run(engine, prompt)
    assert engine.served[request].local_tokens == len(prompt) - 1
    assert engine.counters["queries|disk"] == asked == 1


@pytest.mark.parametrize(
    ("name", "unit", "reason"),
    [
        ("mla", 64, "an entry of a MLAAttentionSpec may cover several tokens"),
        ("deepseek_v4", 4, "may cover several tokens"),
        ("llama4", 16, "an attention chunk ends at every boundary"),
    ],
)
def test_a_model_without_tails_says_why(
    rig: Rig, name: str, unit: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = MODELS[name]()
    prompt = prompt_of(model.chunk_tokens + model.chunk_tokens // 2)
    for expected in (0, model.chunk_tokens):
        engine = rig.engine(model, prefix_match_unit=unit)
        (request,) = rig.run(engine, prompt)
        assert engine.served[request].external_tokens == expected
        rig.end(engine)
    assert [text for text in caplog.messages if "prefix_match_unit" in text and reason in text]
