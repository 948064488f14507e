"""The options of single requests on two tiers: a limit on loaded tokens, and the tiers to load from."""

from __future__ import annotations

import pytest

from tests.standin.rig import Rig
from tests.support.standin.geometries import MODELS
from tests.support.standin.workload import reference

RAM = {"name": "ram", "type": "cpu", "capacity": "64MiB"}


@pytest.mark.parametrize("name", MODELS)
def test_limits_of_loads(rig: Rig, name: str) -> None:
    model = MODELS[name]()
    chunk = model.chunk_tokens
    prompt = [3 + i % 997 for i in range(3 * chunk + 5)]
    engine = rig.engine(model, backends=[RAM, rig.scripted_disk()])

    def loaded(**options: object) -> int:
        assert engine.scheduler.reset_prefix_cache()
        request = engine.add(prompt, 4, options=options)
        rig.step_until(engine, lambda: request in engine.finished)
        rig.drain(engine)
        assert engine.outputs[request] == reference(tuple(prompt), 4)
        return engine.served[request].external_tokens

    assert loaded() == 0
    assert loaded(max_load_tokens=0) == 0
    assert loaded(max_load_tokens=2 * chunk - 1) <= chunk
    assert loaded(max_load_tokens=2 * chunk) <= 2 * chunk
    whole = loaded(max_load_tokens=3 * chunk)
    assert whole == loaded() > 0

    before = engine.counters.copy()
    assert loaded(tiers=["disk"]) == whole
    assert engine.counters["hit_tokens|disk"] - before["hit_tokens|disk"] == whole
    assert engine.counters["queries|ram"] == before["queries|ram"]
    assert loaded(tiers=["ram"]) == whole
    assert engine.counters["hit_tokens|ram"] - before["hit_tokens|ram"] == whole
