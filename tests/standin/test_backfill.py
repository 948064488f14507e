"""Backfill: local attention deeper than local states; the stand-in checks every byte that a step reads."""

from __future__ import annotations

import pytest

from tests.standin.rig import Rig
from tests.support.standin.engine import StandInEngine
from tests.support.standin.eviction import evict
from tests.support.standin.geometries import MODELS
from tests.support.standin.workload import reference

BLOCK = 256


def prompt(blocks: int, family: int = 0) -> list[int]:
    return [3 + (i * (family + 1) + family) % 997 for i in range(blocks * BLOCK + 5)]


def evict_states(engine: StandInEngine) -> int:
    return evict(engine.scheduler.kv_cache_manager.block_pool, engine.kv_cache_config, "states")


def test_the_state_at_the_end_of_local_attention_is_loaded_with_one_block_of_attention(rig: Rig) -> None:
    engine = rig.engine(MODELS["qwen3_next"]())
    rig.run(engine, prompt(4))
    assert evict_states(engine) > 0
    (again,) = rig.run(engine, prompt(4))
    print(engine.served[again], engine.counters)
    assert engine.outputs[again] == reference(tuple(prompt(4)), 4)
    assert engine.served[again].local_tokens == 3 * BLOCK
    assert engine.served[again].external_tokens == BLOCK
    assert engine.counters["backfills|disk"] == 1
