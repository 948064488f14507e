"""The connector on a KV cache in a device's memory: every geometry, with streams that are held at random."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from offload_core.vllm.worker import half
from offload_core.vllm.worker.batched_copy import SwapBlocksBatch
from tests.accelerator.held_streams import HeldStreams, stream_copiers
from tests.standin.rig import Rig
from tests.standin.scripted_disk import Script
from tests.standin.test_geometries import slow_and_unreliable
from tests.standin.test_tails import prompt_of
from tests.support.accelerator import DEVICE, StreamControl
from tests.support.polling import wait_until
from tests.support.standin.geometries import MODELS, StandInModel
from tests.support.standin.workload import Workload, make_workload, reference, repeated_work

long = pytest.mark.long
SEEDS = [0, *(pytest.param(seed, marks=long) for seed in range(1, 10))]
RAM = {"name": "ram", "type": "cpu", "capacity": "64MiB"}
QUICK = ("gemma3", "qwen3_next")
SLOW = ("deepseek_v4",)
LARGEST_PAYLOAD = 80 * 1024
"""Bytes of the largest payload of Gemma 3's stand-in."""


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest) -> StandInModel:
    return MODELS[request.param]()


@pytest.fixture(autouse=True)
def pinned_staging(control: StreamControl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the worker pin its staging memory for the simulated device, as it does for CUDA."""
    monkeypatch.setattr(half, "pinning_in_use", lambda: control)


def drive(rig: Rig, model: StandInModel, control: StreamControl, script: Script, work: Workload, **changes: Any) -> int:
    """Run an engine's lifetime while streams are held; return the prompt tokens that came from the tier."""
    engine = rig.engine(model, script, device=DEVICE, **changes)
    streams = HeldStreams(engine, control, random.Random(work.seed))
    rig.after_tick, rig.before_drain = streams.change, streams.let_go
    asked = rig.drive(engine, work)
    rig.end(engine)
    assert streams.held_steps > 0
    return sum(engine.served[request].external_tokens for request in asked if request in engine.served)


@pytest.mark.parametrize(
    "model", [name if name in QUICK else pytest.param(name, marks=long) for name in MODELS], indirect=True
)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_work(
    rig: Rig, model: StandInModel, control: StreamControl, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With batched copies; the other test has torch's."""
    batched = SwapBlocksBatch(control.swap_blocks_batch, torch.int64, 5)
    monkeypatch.setattr(half, "installed_batched_copy", lambda: batched)
    work = make_workload(model, seed, salts=2)
    script = {"contains": 2, "load_into": 6, "store": 6}
    drive(rig, model, control, Script(seed, hold_steps=script), work)
    assert drive(rig, model, control, Script(seed + 1, hold_steps=script), work) > 0


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=long) if name in SLOW else name for name in MODELS], indirect=True
)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_work_with_aborts_resets_and_an_unreliable_disk(
    rig: Rig,
    model: StandInModel,
    control: StreamControl,
    seed: int,
) -> None:
    work = make_workload(model, seed, aborts=8, resets=4, salts=2)
    for life in range(2):
        drive(rig, model, control, slow_and_unreliable(10 * seed + life), work, async_scheduling=bool(life))


@pytest.mark.parametrize("model", QUICK, indirect=True)
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_random_work_with_lent_memory_and_loads_within_the_step(
    rig: Rig, model: StandInModel, control: StreamControl, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batched = SwapBlocksBatch(control.swap_blocks_batch, torch.int64)
    monkeypatch.setattr(half, "installed_batched_copy", lambda: batched)
    engine = rig.engine(model, device=DEVICE, backends=[RAM], io_process="engine")
    assert engine.workers[0].connector is not None
    (tier,) = engine.workers[0].connector._worker_half._tiers
    wait_until(lambda: tier.lending.is_possible, "the tier's memory is not pinned")
    streams = HeldStreams(engine, control, random.Random(seed))
    rig.after_tick, rig.before_drain = streams.change, streams.let_go
    rig.drive(engine, repeated_work(model, seed))
    rig.end(engine)
    assert streams.held_steps > 0
    for name in ("store_lent|ram", "load_lent|ram", "loads_within_step|ram"):
        assert engine.counters[name] > 0, f"no {name} in {engine.counters}"


@pytest.mark.parametrize("model", QUICK, indirect=True)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_work_with_a_buffer_that_is_nearly_always_full(
    rig: Rig, model: StandInModel, control: StreamControl, seed: int
) -> None:
    work = make_workload(model, seed, aborts=6, salts=2)
    buffer = {"device_buffer_bytes": 2 * LARGEST_PAYLOAD}
    drive(rig, model, control, Script(seed, hold_steps={"store": 4}), work, **buffer)
    assert drive(rig, model, control, Script(seed + 1), work, **buffer) > 0


@pytest.mark.parametrize("model", QUICK[:1], indirect=True)
def test_an_object_whose_blocks_are_reused_while_it_waits_is_not_stored(
    rig: Rig, model: StandInModel, control: StreamControl
) -> None:
    """No copy ends meanwhile. Otherwise the order of their ends decides which object makes room for another."""
    engine = rig.engine(model, Script(0, shut={"store"}), device=DEVICE, staging_bytes="5MiB")
    prompts = [prompt_of(6 * model.chunk_tokens + 1, seed=number) for number in range(12)]
    with control.held(*(copier._store_stream for copier in stream_copiers(engine))):
        for prompt in prompts:
            request = engine.add(prompt, 1)
            rig.step_until(engine, lambda request=request: request in engine.finished)  # type: ignore[misc]
    rig.drain(engine)
    assert engine.counters["store_blocks_reused|all"] > 0, engine.counters
    rig.end(engine)

    second = rig.engine(model, device=DEVICE)
    for prompt in prompts:
        (request,) = rig.run(second, prompt)
        assert second.outputs[request] == reference(tuple(prompt), 4)
    assert second.counters["stores|disk"] > 0, "some were not stored before"


@pytest.mark.parametrize("output_tokens", [1, 20])
@pytest.mark.parametrize("model", QUICK[:1], indirect=True)
def test_a_prompt_that_the_device_buffer_cannot_hold_is_stored_in_later_steps(
    rig: Rig, model: StandInModel, output_tokens: int
) -> None:
    prompt = prompt_of(6 * model.chunk_tokens + 1)
    first = rig.engine(model, device=DEVICE, device_buffer_bytes=2 * LARGEST_PAYLOAD)
    rig.run(first, prompt, max_tokens=output_tokens)
    rig.end(first)

    second = rig.engine(model, device=DEVICE)
    (request,) = rig.run(second, prompt)

    assert second.served[request].external_tokens == 6 * model.chunk_tokens
    assert second.outputs[request] == reference(tuple(prompt), 4)
