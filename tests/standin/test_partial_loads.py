"""Loads that fail in the middle: an engine with one group of full attention uses the part before the gap."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.standin.rig import Rig
from tests.standin.test_faults import prompt
from tests.support.standin.engine import StandInEngine
from tests.support.standin.geometries import MODELS
from tests.support.standin.workload import reference

CHUNKS = 6


def computed_tokens(engine: StandInEngine) -> Counter[str]:
    """Count, from now on, the tokens that the engine computes per request."""
    computed: Counter[str] = Counter()
    schedule = engine.scheduler.schedule

    def counted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        computed.update(output.num_scheduled_tokens)
        return output

    engine.scheduler.schedule = counted
    return computed


def rank_folders(kv: Path) -> list[Path]:
    return sorted(folder for folder in kv.iterdir() if not folder.name.startswith("."))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("ranks", "damaged_ranks"), [(1, 1), (2, 1), (2, 2)])
def test_the_part_before_the_gap_is_used(rig: Rig, ranks: int, damaged_ranks: int, asynchronous: bool) -> None:
    model = MODELS["mla"]()
    chunk, whole = model.chunk_tokens, [3 + i % 997 for i in range(CHUNKS * model.chunk_tokens + 5)]
    first = rig.engine(model, ranks=ranks)
    rig.run(first, whole[: 2 * chunk + 5])
    good = set(rig.kv.rglob("*.kv"))
    rig.run(first, whole)
    for folder in rank_folders(rig.kv)[:damaged_ranks]:
        for path in set(folder.rglob("*.kv")) - good:
            path.write_bytes(b"damaged")
    rig.end(first)

    engine = rig.engine(model, ranks=ranks, async_scheduling=asynchronous)
    computed = computed_tokens(engine)
    (request,) = rig.run(engine, whole)
    assert engine.outputs[request] == reference(tuple(whole), 4)
    assert engine.counters["load_partial|disk"] == damaged_ranks
    assert "recomputed_requests|all" not in engine.counters
    assert computed[request] - 3 == len(whole) - 2 * chunk, "only what is behind the gap, and three sampled tokens"

    (again,) = rig.run(rig.engine(model, ranks=ranks), whole)
    assert rig.script.calls["load_into"] > 0
    assert engine.outputs[request] == rig._engines[-1].outputs[again]
    assert rig._engines[-1].served[again].external_tokens == CHUNKS * chunk, "what was missing is stored again"


def test_a_rank_without_any_part_has_all_ranks_recompute(rig: Rig) -> None:
    model = MODELS["mla"]()
    chunk, whole = model.chunk_tokens, [3 + i % 997 for i in range(CHUNKS * model.chunk_tokens + 5)]
    first = rig.engine(model, ranks=2)
    rig.run(first, whole[: 2 * chunk + 5])
    good = set(rig.kv.rglob("*.kv"))
    rig.run(first, whole)
    rig.end(first)
    some, everything = rank_folders(rig.kv)
    for path in {*everything.rglob("*.kv"), *(set(some.rglob("*.kv")) - good)}:
        path.write_bytes(b"damaged")

    engine = rig.engine(model, ranks=2)
    computed = computed_tokens(engine)
    (request,) = rig.run(engine, whole)
    assert engine.outputs[request] == reference(tuple(whole), 4)
    assert engine.counters["load_partial|disk"] == engine.counters["recomputed_requests|all"] == 1
    assert computed[request] - 3 == len(whole)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next", "deepseek_v4"])
def test_with_several_groups_a_load_is_used_in_full_or_not_at_all(rig: Rig, name: str) -> None:
    model = MODELS[name]()
    first = rig.engine(model)
    rig.run(first, prompt(model)[: model.chunk_tokens + 5])
    good = set(rig.kv.rglob("*.kv"))
    rig.run(first, prompt(model))
    for path in set(rig.kv.rglob("*.kv")) - good:
        path.write_bytes(b"damaged")
    rig.end(first)

    engine = rig.engine(model)
    (request,) = rig.run(engine, prompt(model))
    assert engine.outputs[request] == reference(tuple(prompt(model)), 4)
    assert engine.counters["recomputed_requests|all"] == 1
    assert "load_partial|disk" not in engine.counters
