"""Backfill: local attention deeper than local states; the stand-in checks every byte that a step reads."""

from __future__ import annotations

import dataclasses
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from offload_core.vllm.connector import HybridOffloadConnector
from offload_core.vllm.scheduler.load_plan import plan_load
from tests.standin.rig import Rig
from tests.standin.scripted_disk import Script
from tests.standin.test_geometries import slow_and_unreliable
from tests.support.local_eviction import evict, evict_path
from tests.support.standin.cache import WrongBytesError
from tests.support.standin.engine import StandInEngine
from tests.support.standin.geometries import MODELS
from tests.support.standin.workload import drive, make_workload, reference

BLOCK = 256
LONG, SHORT = 4, 2


def prompt(blocks: int, end: int = 5) -> list[int]:
    """A prompt of whole blocks and a bit; all of them begin alike."""
    return [3 + i % 997 for i in range(blocks * BLOCK)] + list(range(500, 500 + end))


def engine_with(rig: Rig, *blocks: int, script: Script | None = None, **changes: Any) -> StandInEngine:
    """An engine that holds prompts locally and on the tier, and has evicted all their states locally."""
    engine = rig.engine(MODELS["qwen3_next"](), script, **changes)
    for count in blocks or (LONG,):
        rig.run(engine, prompt(count))
    assert evict_locally(engine, "states") > 0
    engine.counters.clear()
    return engine


def evict_locally(engine: StandInEngine, kind: str) -> int:
    return evict(engine.scheduler.kv_cache_manager.block_pool, engine.kv_cache_config, kind)


def evict_tail(engine: StandInEngine, kind: str, tokens: list[int], first_token: int) -> None:
    """Evict local blocks of a kind that hold a prompt's tokens from ``first_token`` on."""
    request = engine.scheduler.requests[engine.add(tokens, 1)]
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert evict_path(pool, engine.kv_cache_config, kind, request, first_token) > 0
    engine.abort(request.request_id)


def states_on_disk(kv: Path) -> list[Path]:
    """The stored states, in the order in which they were stored."""
    return sorted(kv.rglob("state-*/**/*.kv"), key=lambda path: path.stat().st_mtime_ns)


def check(engine: StandInEngine, request: str, tokens: list[int], local: int, external: int, objects: int) -> None:
    """Check the output, the sources in blocks, and the objects loaded since the counters were cleared."""
    assert engine.outputs[request] == reference(tuple(tokens), 4)
    served = engine.served[request]
    assert (served.local_tokens // BLOCK, served.external_tokens // BLOCK) == (local, external)
    assert engine.counters["load_hits|disk"] == objects


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_at_the_end_of_local_attention(rig: Rig, ranks: int, asynchronous: bool) -> None:
    engine = engine_with(rig, ranks=ranks, async_scheduling=asynchronous)
    (again,) = rig.run(engine, prompt(LONG))
    check(engine, again, prompt(LONG), LONG - 1, 1, 2 * ranks)
    assert engine.counters["backfills|disk"] == 1


def test_states_of_some_groups_are_still_there(rig: Rig) -> None:
    engine = rig.engine(MODELS["qwen3_next"]())
    rig.run(engine, prompt(LONG))
    engine.counters.clear()
    assert evict(engine.scheduler.kv_cache_manager.block_pool, engine.kv_cache_config, "states", 1) > 0
    (again,) = rig.run(engine, prompt(LONG))
    check(engine, again, prompt(LONG), LONG - 1, 1, 2)


def test_the_next_turn_of_a_conversation(rig: Rig) -> None:
    engine = engine_with(rig)
    turn = [*prompt(LONG), *range(100, 100 + BLOCK)]
    (request,) = rig.run(engine, turn)
    check(engine, request, turn, LONG - 1, 1, 2)


def test_a_deeper_boundary_is_on_the_tier(rig: Rig) -> None:
    engine = engine_with(rig)
    evict_tail(engine, "attention", prompt(LONG), 2 * BLOCK)
    (again,) = rig.run(engine, prompt(LONG))
    check(engine, again, prompt(LONG), 2, LONG - 2, LONG - 2 + 1)


def test_an_earlier_boundary_has_the_only_state(rig: Rig) -> None:
    engine = engine_with(rig, SHORT, LONG)
    states_on_disk(rig.kv)[-1].unlink()
    (again,) = rig.run(engine, prompt(LONG))
    check(engine, again, prompt(LONG), SHORT - 1, 1, 2)


def test_the_state_is_kept_where_local_attention_ends(rig: Rig) -> None:
    engine = engine_with(rig, SHORT, LONG)
    states_on_disk(rig.kv)[-1].unlink()
    turn = [*prompt(LONG), *range(100, 100 + BLOCK)]
    (request,) = rig.run(engine, turn)
    check(engine, request, turn, SHORT - 1, 1, 2)
    (again,) = rig.run(engine, prompt(LONG))
    check(engine, again, prompt(LONG), LONG, 0, 2)


def test_a_loaded_state_stays_in_the_local_cache(rig: Rig) -> None:
    engine = engine_with(rig)
    turns = [[*prompt(LONG), *range(first, first + BLOCK)] for first in (100, 200)]
    for turn, local in zip(turns, (LONG - 1, LONG), strict=True):
        (request,) = rig.run(engine, turn)
        check(engine, request, turn, local, LONG - local, 2)


def test_without_any_state_everything_is_computed(rig: Rig) -> None:
    engine = engine_with(rig)
    for path in states_on_disk(rig.kv):
        path.unlink()
    (again,) = rig.run(engine, prompt(LONG))
    check(engine, again, prompt(LONG), 0, 0, 0)


def test_without_the_last_block_of_attention_on_the_tier_there_is_no_backfill(rig: Rig) -> None:
    engine = rig.engine(MODELS["qwen3_next"]())
    rig.run(engine, prompt(LONG - 1))
    for state in states_on_disk(rig.kv):
        state.unlink()
    others = set(rig.kv.rglob("full-*/**/*.kv"))
    rig.run(engine, prompt(LONG))
    (last,) = set(rig.kv.rglob("full-*/**/*.kv")) - others
    last.unlink()
    assert evict_locally(engine, "states") > 0
    engine.counters.clear()
    (again,) = rig.run(engine, prompt(LONG))
    check(engine, again, prompt(LONG), 0, 0, 0)


def test_a_local_state_one_object_before_the_boundary_needs_no_backfill(rig: Rig) -> None:
    engine = engine_with(rig, LONG - 1, LONG)
    rig.run(engine, prompt(LONG - 1))  # brings that state back
    engine.counters.clear()
    (again,) = rig.run(engine, prompt(LONG))
    check(engine, again, prompt(LONG), LONG - 1, 1, 2)
    assert engine.counters["backfills|disk"] == 0


def test_states_deeper_than_local_attention_are_loaded_as_without_backfill(rig: Rig) -> None:
    engine = rig.engine(MODELS["qwen3_next"]())
    rig.run(engine, prompt(LONG))
    engine.counters.clear()
    evict_tail(engine, "attention", prompt(LONG), 2 * BLOCK)
    (again,) = rig.run(engine, prompt(LONG))
    check(engine, again, prompt(LONG), 0, LONG, LONG + 1)


def test_chunks_of_several_blocks(rig: Rig) -> None:
    model = dataclasses.replace(MODELS["qwen3_next"](), hybrid_chunk_size=2 * BLOCK)
    engine = rig.engine(model)
    rig.run(engine, prompt(LONG))
    for kept, local, objects in ((LONG, LONG - 1, 2), (3, 3, 2), (2, 2, 2), (1, 1, 3)):
        evict_locally(engine, "states")
        evict_tail(engine, "attention", prompt(LONG), kept * BLOCK) if kept < LONG else None
        engine.counters.clear()
        (again,) = rig.run(engine, prompt(LONG))
        check(
            engine, again, prompt(LONG), local if objects == 2 else 0, LONG - local if objects == 2 else LONG, objects
        )


def test_two_requests_with_one_prefix_load_it_once(rig: Rig) -> None:
    engine = engine_with(rig)
    both = rig.run(engine, prompt(LONG), prompt(LONG))
    assert [engine.outputs[request] for request in both] == [reference(tuple(prompt(LONG)), 4)] * 2
    assert [engine.served[request].external_tokens for request in both] == [BLOCK, 0]
    assert engine.counters["load_hits|disk"] == 2


def test_requests_that_part_behind_the_boundary_load_its_state_once(rig: Rig) -> None:
    engine = engine_with(rig)
    turns = [[*prompt(LONG), *range(first, first + BLOCK)] for first in (100, 200, 300)]
    requests = rig.run(engine, *turns)
    assert [engine.outputs[request] for request in requests] == [reference(tuple(turn), 4) for turn in turns]
    assert [engine.served[request].external_tokens for request in requests] == [BLOCK, 0, 0]
    assert engine.counters["load_hits|disk"] == 2


def test_attention_that_a_running_request_uses_is_loaded_again(rig: Rig) -> None:
    engine = rig.engine(MODELS["qwen3_next"]())
    running = engine.add(prompt(LONG), 200)
    rig.step_until(engine, lambda: len(engine.outputs[running]) > 20)
    evict_locally(engine, "states")
    engine.counters.clear()
    again = engine.add(prompt(LONG), 4)
    rig.step_until(engine, lambda: again in engine.finished)
    check(engine, again, prompt(LONG), LONG - 1, 1, 2)
    rig.drain(engine)
    assert engine.outputs[running] == reference(tuple(prompt(LONG)), 200)


def test_steps_may_outlast_an_offer(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    passed = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0])
    monkeypatch.setattr("offload_core.vllm.scheduler.load_offers.time", clock)
    engine = engine_with(rig)
    request = engine.add(prompt(LONG), 4)
    connector = engine.connector
    assert isinstance(connector, HybridOffloadConnector)
    rig.step_until(engine, lambda: connector.supports_divergent_local_hybrid_hits)
    passed[0] = 3600.0
    rig.drain(engine)
    check(engine, request, prompt(LONG), LONG - 1, 1, 2)


def test_an_engine_that_never_reports_attention_alone_loads_as_without_backfill(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HybridOffloadConnector, "supports_divergent_local_hybrid_hits", False)
    engine = engine_with(rig)
    (again,) = rig.run(engine, prompt(LONG))
    check(engine, again, prompt(LONG), 0, LONG, LONG + 1)
    assert engine.counters["backfills|disk"] == 0


def test_an_engine_that_always_reports_attention_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HybridOffloadConnector, "supports_divergent_local_hybrid_hits", True)
    engine = engine_with(rig)
    (again,) = rig.run(engine, prompt(LONG))
    check(engine, again, prompt(LONG), LONG - 1, 1, 2)
    for path in states_on_disk(rig.kv):
        path.unlink()
    evict_locally(engine, "states")
    (last,) = rig.run(engine, prompt(LONG))
    assert engine.served[last].external_tokens == engine.served[last].local_tokens == 0


def test_a_state_that_is_claimed_and_not_loaded_is_seen(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_states(*args: Any) -> Any:
        return [item for item in plan_load(*args) or () if not item.chunk.pack.startswith("state")]

    engine = engine_with(rig)
    monkeypatch.setattr("offload_core.vllm.scheduler.new_loads.plan_load", without_states)
    with pytest.raises(WrongBytesError, match=f"the state after {LONG * BLOCK} tokens is not in"):
        rig.run(engine, prompt(LONG))
    for request in engine.unfinished():
        engine.abort(request)


@pytest.mark.parametrize("during", ["the decision", "the load"])
def test_abort(rig: Rig, during: str) -> None:
    engine = engine_with(rig, script=Script(0))
    rig.script.hold_steps["load_into"] = 0
    rig.script.shut.add("load_into")
    request = engine.add(prompt(LONG), 4)
    connector = engine.connector
    assert isinstance(connector, HybridOffloadConnector)
    if during == "the decision":
        rig.step_until(engine, lambda: connector.supports_divergent_local_hybrid_hits)
    else:
        rig.step_until(engine, lambda: rig.script.held["load_into"])
    engine.abort(request)
    assert not connector.supports_divergent_local_hybrid_hits
    rig.step_until(engine, lambda: not engine.busy)
    rig.open()
    (again,) = rig.run(engine, prompt(LONG))
    assert engine.outputs[again] == reference(tuple(prompt(LONG)), 4)
    assert engine.served[again].local_tokens == (LONG - 1) * BLOCK


def test_preemption_before_the_load(rig: Rig) -> None:
    """The local cache is emptied between the decision and the engine's next question."""
    engine = engine_with(rig)
    request = engine.add(prompt(LONG), 4)
    connector = engine.connector
    assert isinstance(connector, HybridOffloadConnector)
    rig.step_until(engine, lambda: connector.supports_divergent_local_hybrid_hits)
    assert engine.reset_prefix_cache(running=True, connector=False)
    rig.drain(engine)
    check(engine, request, prompt(LONG), 0, LONG, LONG + 1)


@pytest.mark.parametrize("fault", ["damage", "miss"])
def test_a_load_that_fails_ends_in_the_right_output(rig: Rig, fault: str) -> None:
    engine = engine_with(rig)
    setattr(rig.script, fault, 1.0)
    (again,) = rig.run(engine, prompt(LONG))
    assert engine.outputs[again] == reference(tuple(prompt(LONG)), 4)
    assert engine.counters["recomputed_requests|all"] > 0


def test_a_model_with_windows_too_gets_no_backfill(rig: Rig) -> None:
    model = MODELS["qwen3_next"]()
    full = model.layers["model.layers.3"]
    assert isinstance(full, FullAttentionSpec)
    window = SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=full.num_kv_heads, head_size=full.head_size, dtype=full.dtype, sliding_window=640
    )
    layers = {f"model.layers.{i}": window if i % 4 == 0 else model.layers[f"model.layers.{i}"] for i in range(4)}
    engine = rig.engine(dataclasses.replace(model, layers=layers, num_blocks=80))
    rig.run(engine, prompt(LONG))
    for kinds in (("states",), ("windows",), ("states", "windows")):
        for kind in kinds:
            evict_locally(engine, kind)
        engine.counters.clear()
        (again,) = rig.run(engine, prompt(LONG))
        assert engine.outputs[again] == reference(tuple(prompt(LONG)), 4)
        assert engine.served[again].external_tokens == LONG * BLOCK
        assert engine.counters["backfills|disk"] == 0


def evicting(rig: Rig, engine: StandInEngine, seed: int) -> Any:
    """Let the I/O of a step happen, then perhaps evict local states, or a few blocks of any kind."""
    draw = random.Random(f"evictions/{seed}")
    pool = engine.scheduler.kv_cache_manager.block_pool

    def between_steps() -> None:
        rig.tick()
        if draw.random() < 0.2:
            evict_locally(engine, "states")
        if draw.random() < 0.1:
            pool.evict_blocks({draw.randrange(1, pool.num_gpu_blocks) for _ in range(4)})

    return between_steps


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
@pytest.mark.parametrize(
    "seed", [0, 1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)]
)
def test_random_work_with_diverging_evictions(rig: Rig, name: str, seed: int) -> None:
    model = dataclasses.replace(MODELS[name](), num_blocks=2 * MODELS[name]().num_blocks)
    work = make_workload(model, seed, requests=24, aborts=8 * (seed % 2), resets=3 * (seed % 2), salts=2)
    backfills = 0
    for life in range(2):
        script = slow_and_unreliable(seed) if seed % 2 else Script(seed, hold_steps={"contains": 2, "load_into": 6})
        engine = rig.engine(model, script, async_scheduling=bool(life), ranks=1 + seed // 2)
        drive(engine, work, evicting(rig, engine, seed))
        rig.drain(engine)
        backfills += engine.counters["backfills|disk"]
        rig.end(engine)
    assert backfills > 0
