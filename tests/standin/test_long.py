"""Many seeds, both scheduling modes, one and two ranks: run by ``make test-long``."""

from __future__ import annotations

import random

import pytest

from tests.standin.rig import Rig
from tests.standin.scripted_disk import CALLS, Script
from tests.support.standin.geometries import MODELS
from tests.support.standin.workload import make_workload


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(10))
def test_random_work_of_every_kind(rig: Rig, name: str, seed: int) -> None:
    rng = random.Random(f"{name}/{seed}")
    model = MODELS[name]()
    work = make_workload(
        model, seed, requests=rng.choice((10, 24)), aborts=rng.choice((0, 8, 20)), resets=rng.choice((0, 6)), salts=2
    )
    for life in range(2):
        script = Script(2 * seed + life, hold_steps={call: rng.choice((0, 2, 8, 30)) for call in CALLS})
        if rng.random() < 0.5:
            script.fail = dict.fromkeys(CALLS, 0.05)
            script.damage = script.miss = script.reject = 0.05
        engine = rig.engine(model, script, async_scheduling=rng.random() < 0.5, ranks=rng.choice((1, 2)))
        rig.drive(engine, work)
        rig.end(engine)
