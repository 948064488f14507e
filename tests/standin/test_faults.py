"""Events during running transfers: abort, reset, reuse of blocks, end of the engine, and faults of a tier."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest

from offload_core.memory.block_copier import BlockSlice, CpuBlockCopier, OnPart
from offload_core.memory.payload_layout import PackLayout
from tests.standin.rig import Rig
from tests.standin.scripted_disk import Script
from tests.support.damage import flipped
from tests.support.standin.cache import WrongBytesError
from tests.support.standin.engine import StandInEngine
from tests.support.standin.geometries import MODELS, StandInModel
from tests.support.standin.workload import Arrival, check_outputs, make_workload, reference

NAMES = ["gemma3", "gpt_oss", "qwen3_next", "mla", "deepseek_v4"]


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest) -> StandInModel:
    return MODELS[request.param]()


def prompt(model: StandInModel, family: int = 0) -> list[int]:
    """Two boundaries and a bit."""
    return [3 + (i * (family + 1) + family) % 997 for i in range(2 * model.chunk_tokens + 5)]


def stored(rig: Rig, model: StandInModel, *families: int, ranks: int = 1) -> None:
    """Fill the disk with an engine that is shut down again."""
    engine = rig.engine(model, ranks=ranks)
    for family in families or (0,):
        rig.run(engine, prompt(model, family))
    rig.end(engine)


def take_all_blocks(rig: Rig, model: StandInModel, engine: StandInEngine) -> None:
    """Let other requests use every block of the cache once, while the script holds its calls."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    handed_out: set[int] = set()
    family = 10
    while len(handed_out) < pool.num_gpu_blocks - 1:
        request = engine.add(prompt(model, family), 2)
        while request not in engine.finished:
            engine.step()
            handed_out.update(engine.new_blocks)
            rig.tick()
        assert engine.outputs[request] == reference(tuple(prompt(model, family)), 2)
        family += 1


def check_that_reused_blocks_do_not_matter(rig: Rig, model: StandInModel, engine: StandInEngine) -> None:
    """Let other requests use all blocks before the held stores go on; the next engine must find the right bytes."""
    take_all_blocks(rig, model, engine)
    rig.open()
    rig.drain(engine)
    rig.end(engine)

    second = rig.engine(model)
    assert external(second, rig.run(second, prompt(model))[0]) == 2 * model.chunk_tokens


def external(engine: StandInEngine, request: str) -> int:
    return engine.served[request].external_tokens


def loading(rig: Rig, engine: StandInEngine) -> str:
    """A request whose load is held."""
    request = engine.add(prompt(engine.model), 4)
    rig.step_until(engine, lambda: rig.script.held["load_into"])
    assert engine.states()[request] == "WAITING_FOR_REMOTE_KVS"
    return request


def test_abort_while_loading(rig: Rig, model: StandInModel) -> None:
    stored(rig, model)
    engine = rig.engine(model, Script(0, shut={"load_into"}))
    engine.abort(loading(rig, engine))
    rig.step_until(engine, lambda: not engine.busy)

    take_all_blocks(rig, model, engine)
    rig.open()
    again = rig.run(engine, prompt(model))

    assert engine.counters["load_late|disk"] > 0
    assert engine.outputs[again[0]] == reference(tuple(prompt(model)), 4)


def test_abort_while_storing(rig: Rig, model: StandInModel) -> None:
    engine = rig.engine(model, Script(0, shut={"store"}))
    request = engine.add(prompt(model), 40)
    rig.step_until(engine, lambda: engine.outputs[request] and rig.script.held["store"])
    engine.abort(request)
    check_that_reused_blocks_do_not_matter(rig, model, engine)


def test_blocks_of_a_finished_request_are_reused_at_once(rig: Rig, model: StandInModel) -> None:
    engine = rig.engine(model, Script(0, shut={"store"}))
    request = engine.add(prompt(model), 2)
    rig.step_until(engine, lambda: request in engine.finished)
    check_that_reused_blocks_do_not_matter(rig, model, engine)


def test_new_weights_while_storing(rig: Rig, model: StandInModel) -> None:
    engine = rig.engine(model, Script(0, shut={"store"}))
    request = engine.add(prompt(model), 40)
    rig.step_until(engine, lambda: engine.outputs[request] and rig.script.held["store"])

    assert engine.reset_prefix_cache(running=True, connector=True)
    rig.open()
    rig.drain(engine)
    check_outputs(engine, {request: Arrival(0, tuple(prompt(model)), 40)})

    assert external(engine, rig.run(engine, prompt(model))[0]) == 0, (
        "what was stored before the reset is of old weights"
    )


def test_reset_while_loading(rig: Rig, model: StandInModel) -> None:
    stored(rig, model)
    engine = rig.engine(model, Script(0, shut={"load_into"}))
    request = loading(rig, engine)

    assert not engine.reset_prefix_cache(running=False, connector=True), "vLLM keeps the blocks that the load holds"
    rig.step_until(engine, lambda: request in engine.finished)
    rig.open()
    rig.drain(engine)

    assert engine.outputs[request] == reference(tuple(prompt(model)), 4)


def test_a_load_that_is_late_is_recomputed(rig: Rig, model: StandInModel) -> None:
    stored(rig, model)
    engine = rig.engine(model, Script(0, shut={"load_into"}), load_timeout_seconds=0.01)
    request = loading(rig, engine)

    rig.step_until(engine, lambda: request in engine.finished, max_steps=100_000)
    rig.open()
    rig.drain(engine)

    assert engine.outputs[request] == reference(tuple(prompt(model)), 4)
    assert engine.counters["load_timeouts|disk"] > 0


def test_what_one_tier_does_not_deliver_is_loaded_from_another(rig: Rig, model: StandInModel) -> None:
    other = rig.kv.with_name("other")
    backends = [{**rig.scripted_disk(), "load_weight": 10}, {"name": "other", "type": "disk", "path": str(other)}]
    first = rig.engine(model, backends=backends)
    rig.run(first, prompt(model))
    rig.end(first)
    for path in rig.kv.rglob("*.kv"):
        path.write_bytes(b"damaged")

    engine = rig.engine(model, backends=backends)
    (request,) = rig.run(engine, prompt(model))
    assert engine.outputs[request] == reference(tuple(prompt(model)), 4)
    assert engine.counters["load_corrupt|disk"] > 0
    assert engine.counters["load_hits|other"] > 0
    assert external(engine, request) == 2 * model.chunk_tokens


def test_shutdown_with_work_in_flight(rig: Rig, model: StandInModel) -> None:
    stored(rig, model)
    engine = rig.engine(model, Script(0, shut={"load_into", "store"}), shutdown_timeout_seconds=0.01)
    loading(rig, engine)
    engine.add(prompt(model, 1), 4)
    rig.step_until(engine, lambda: rig.script.held["store"])
    rig.end(engine)
    rig.open()

    second = rig.engine(model)
    first, other = rig.run(second, prompt(model), prompt(model, 1))
    assert external(second, first) == 2 * model.chunk_tokens
    assert second.outputs[other] == reference(tuple(prompt(model, 1)), 4)


def test_a_tier_that_keeps_nothing(rig: Rig, model: StandInModel) -> None:
    for seed in range(2):
        engine = rig.engine(model, Script(seed, reject=1.0))
        asked = rig.drive(engine, make_workload(model, seed))
        assert sum(external(engine, request) for request in asked) == 0
        assert engine.counters["store_rejected|disk"] > 0
        rig.end(engine)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_part_is_missing_is_a_miss_for_all(rig: Rig, model: StandInModel, rank: int) -> None:
    stored(rig, model, ranks=2)
    namespaces = sorted(folder for folder in rig.kv.iterdir() if not folder.name.startswith("."))
    assert len(namespaces) == 2
    shutil.rmtree(namespaces[rank])

    engine = rig.engine(model, ranks=2)
    (request,) = rig.run(engine, prompt(model))
    assert external(engine, request) == 0
    assert not [name for name in engine.counters if name.startswith("load_")], "a miss, not a load that fails"
    rig.end(engine)

    engine = rig.engine(model, ranks=2)
    (request,) = rig.run(engine, prompt(model))
    assert external(engine, request) == 2 * model.chunk_tokens, "both parts are stored again"


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_random_work_on_two_ranks(rig: Rig, model: StandInModel, seed: int) -> None:
    work = make_workload(model, seed, aborts=4, resets=2)
    calls = {"contains": 2, "load_into": 6, "store": 6}
    for life in range(2):
        script = Script(seed + 10 * life, hold_steps=dict(calls), fail={"load_into": 0.1}, damage=0.05, reject=0.05)
        rig.drive(rig.engine(model, script, ranks=2), work)


def test_failed_loads_do_not_stop_the_engine(rig: Rig) -> None:
    model = MODELS["mla"]()
    long = [[3 + (i * (family + 1)) % 997 for i in range(1600)] for family in range(2)]
    first = rig.engine(model)
    rig.run(first, *(tokens[:1300] for tokens in long))
    whole = set(rig.kv.rglob("*.kv"))
    rig.run(first, *long)
    for deepest in set(rig.kv.rglob("*.kv")) - whole:
        deepest.write_bytes(b"damaged")
    rig.end(first)

    engine = rig.engine(model)
    requests = [engine.add(tokens, 4) for tokens in long]
    rig.step_until(engine, lambda: all(request in engine.finished for request in requests))


def test_a_failed_load_that_waits_for_another_adapter_holds_nobody_up(rig: Rig, adapters: list[LoRARequest]) -> None:
    model = MODELS["mla"]()
    one_at_a_time: dict[str, Any] = {"enable_lora": True, "max_loras": 1}
    first = rig.engine(model, **one_at_a_time)
    request = first.add(prompt(model), 1, lora_request=adapters[0])
    rig.step_until(first, lambda: request in first.finished, max_steps=20_000)
    rig.drain(first)
    damaged = list(rig.kv.rglob("*.kv"))
    rig.run(first, prompt(model, 1))
    rig.end(first)
    assert damaged
    for path in damaged:
        path.write_bytes(flipped(path.read_bytes()))

    engine = rig.engine(model, Script(0, shut={"load_into"}), **one_at_a_time)
    failed = engine.add(prompt(model), 1, lora_request=adapters[0])
    rig.step_until(engine, lambda: rig.script.held["load_into"], max_steps=20_000)
    running = engine.add([5] * 10, 1500, lora_request=adapters[1])
    rig.step_until(engine, lambda: engine.states()[running] == "RUNNING", max_steps=20_000)
    rig.open()
    rig.step_until(engine, lambda: engine.states()[failed] == "WAITING")
    other = engine.add(prompt(model, 1), 1)
    rig.step_until(engine, lambda: other in engine.finished)
    assert external(engine, other) == 2 * model.chunk_tokens
    assert (engine.states()[failed], engine.states()[running]) == ("WAITING", "RUNNING")
    engine.abort(running)
    rig.step_until(engine, lambda: failed in engine.finished)
    assert engine.outputs[failed] == reference(tuple(prompt(model)), 1)
    rig.drain(engine)


@pytest.mark.parametrize("broken", ["scatter nothing", "scatter elsewhere", "gather a wrong byte"])
def test_the_stand_in_sees_wrong_bytes(
    rig: Rig, model: StandInModel, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    scatter, gather = CpuBlockCopier.scatter_in_parts, CpuBlockCopier.gather_in_parts

    def gather_a_wrong_byte(
        self: CpuBlockCopier, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor, on_part: OnPart
    ) -> bool:
        def spoil(nbytes: int) -> None:
            payload[-1:].add_(1)
            on_part(nbytes)

        return gather(self, layout, blocks, payload, spoil)

    if broken == "scatter nothing":
        monkeypatch.setattr(CpuBlockCopier, "scatter_in_parts", lambda *_: None)
    elif broken == "scatter elsewhere":
        monkeypatch.setattr(
            CpuBlockCopier,
            "scatter_in_parts",
            lambda self, layout, blocks, payload, on_part: scatter(self, layout, blocks, payload.flip(0), on_part),
        )
    else:
        monkeypatch.setattr(CpuBlockCopier, "gather_in_parts", gather_a_wrong_byte)
    stored(rig, model)
    engine = rig.engine(model)
    with pytest.raises(WrongBytesError, match=r"request r1, step from token .* group "):
        rig.run(engine, prompt(model))
