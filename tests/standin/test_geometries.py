"""Every geometry under random work: right bytes everywhere, served from disk in the next lifetime, nothing left."""

from __future__ import annotations

import pytest

from tests.standin.rig import Rig
from tests.standin.scripted_disk import Script
from tests.support.standin.geometries import MODELS, StandInModel
from tests.support.standin.workload import make_workload, reference

LONG_SEEDS = [pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2)]


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest) -> StandInModel:
    return MODELS[request.param]()


def slow_and_unreliable(seed: int) -> Script:
    return Script(
        seed,
        hold_steps={"contains": 2, "load_into": 6, "store": 6},
        fail={"contains": 0.05, "load_into": 0.05, "store": 0.05},
        damage=0.05,
        miss=0.05,
        reject=0.1,
    )


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_stand_in_is_at_peace_with_vllm_alone(rig: Rig, name: str, asynchronous: bool) -> None:
    model = MODELS[name]()
    engine = rig.bare_engine(model, async_scheduling=asynchronous)
    asked = rig.drive(engine, make_workload(model, 7, requests=24, aborts=8, resets=4))
    assert sum(engine.served[request].local_tokens for request in asked if request in engine.served) > 0


def test_the_next_lifetime_is_served_to_the_deepest_boundary(rig: Rig, model: StandInModel) -> None:
    boundary = 2 * model.chunk_tokens
    prompt = [3 + i % 997 for i in range(boundary + 5)]
    first = rig.engine(model)
    rig.run(first, prompt)
    rig.end(first)

    second = rig.engine(model)
    (request,) = rig.run(second, prompt)

    assert second.served[request].external_tokens == boundary
    assert second.outputs[request] == reference(tuple(prompt), 4)


@pytest.mark.parametrize("seed", [0, *LONG_SEEDS])
def test_random_work(rig: Rig, model: StandInModel, seed: int) -> None:
    work = make_workload(model, seed, salts=2)
    first = rig.engine(model, Script(seed, hold_steps={"contains": 2, "load_into": 6, "store": 6}))
    rig.drive(first, work)
    rig.end(first)

    second = rig.engine(model, Script(seed + 1, hold_steps={"contains": 2, "load_into": 6, "store": 6}))
    asked = rig.drive(second, work)

    assert sum(second.served[request].external_tokens for request in asked) > 0


@pytest.mark.parametrize("seed", [0, *LONG_SEEDS])
def test_random_work_with_aborts_resets_and_an_unreliable_disk(rig: Rig, model: StandInModel, seed: int) -> None:
    work = make_workload(model, seed, aborts=8, resets=4, salts=2)
    for life in range(2):
        engine = rig.engine(model, slow_and_unreliable(10 * seed + life), async_scheduling=bool(life))
        rig.drive(engine, work)
        rig.end(engine)
