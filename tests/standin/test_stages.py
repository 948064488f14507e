"""Pipeline stages: each rank has the blocks of its own layers, and a hit needs the parts of all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.standin.rig import Rig
from tests.standin.scripted_disk import Script
from tests.standin.test_geometries import LONG_SEEDS
from tests.support.standin.geometries import MODELS, StandInModel
from tests.support.standin.workload import make_workload, reference

STAGED = [name for name in MODELS if name != "deepseek_v4"]
"""vLLM 0.32 cannot allocate DeepSeek-V4's packed cache for one stage, with or without a connector."""


@pytest.fixture(params=STAGED)
def model(request: pytest.FixtureRequest) -> StandInModel:
    return MODELS[request.param]()


def prompt_for(model: StandInModel) -> list[int]:
    return [3 + i % 997 for i in range(2 * model.chunk_tokens + 5)]


def namespaces(folder: Path) -> list[Path]:
    """The folders of objects of each fingerprint."""
    return sorted(path for path in folder.iterdir() if len(path.name) == 64)


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_rank_finds_its_own_layers(rig: Rig, model: StandInModel, ranks: int) -> None:
    prompt = prompt_for(model)
    first = rig.engine(model, stages=2, ranks=ranks)
    rig.run(first, prompt)
    rig.end(first)
    assert len(namespaces(rig.kv)) == 2 * ranks

    second = rig.engine(model, stages=2, ranks=ranks)
    (request,) = rig.run(second, prompt)
    assert second.served[request].external_tokens == 2 * model.chunk_tokens
    assert second.outputs[request] == reference(tuple(prompt), 4)


def test_without_the_part_of_one_rank_there_is_no_hit(rig: Rig, model: StandInModel) -> None:
    prompt = prompt_for(model)
    first = rig.engine(model, stages=2)
    rig.run(first, prompt)
    rig.end(first)
    for path in namespaces(rig.kv)[1].rglob("*.kv"):
        path.unlink()

    second = rig.engine(model, stages=2)
    (request,) = rig.run(second, prompt)
    assert second.served[request].external_tokens == 0
    assert second.outputs[request] == reference(tuple(prompt), 4)


def test_other_stages_are_another_identity(rig: Rig) -> None:
    model = MODELS["gemma3"]()
    prompt = prompt_for(model)
    for stages in (1, 2):
        engine = rig.engine(model, stages=stages)
        (request,) = rig.run(engine, prompt)
        assert engine.served[request].external_tokens == 0
        rig.end(engine)
    assert len(namespaces(rig.kv)) == 1 + 2


@pytest.mark.parametrize("seed", [0, *LONG_SEEDS])
def test_random_work_in_two_stages(rig: Rig, model: StandInModel, seed: int) -> None:
    work = make_workload(model, seed, aborts=4, salts=2)
    for life in range(2):
        script = Script(seed + life, hold_steps={"contains": 2, "load_into": 6, "store": 6})
        engine = rig.engine(model, script, stages=2)
        asked = rig.drive(engine, work)
        external = sum(engine.served[request].external_tokens for request in asked if request in engine.served)
        rig.end(engine)
    assert external > 0


@pytest.mark.parametrize(
    "backend",
    [
        {"name": "ram", "type": "cpu", "capacity": "64MiB"},
        {"name": "disk", "type": "disk", "path": "kv", "capacity": "64MiB", "compression": "zstd"},
    ],
    ids=["lent", "compressed"],
)
def test_a_stage_without_layers_of_a_pack_has_objects_without_bytes(rig: Rig, backend: dict[str, object]) -> None:
    model = MODELS["qwen3_next"]()  # its one layer of full attention is in the second stage
    prompt = prompt_for(model)
    if "path" in backend:
        backend = {**backend, "path": str(rig.kv)}
    engine = rig.engine(model, stages=2, backends=[backend])
    rig.run(engine, prompt)
    for _ in range(2):
        assert engine.scheduler.reset_prefix_cache()
        (request,) = rig.run(engine, prompt)
        assert engine.served[request].external_tokens == 2 * model.chunk_tokens
        assert engine.outputs[request] == reference(tuple(prompt), 4)
