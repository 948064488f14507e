"""The metrics of whole engines: requests count once whatever the number of ranks, and objects once per rank."""

from __future__ import annotations

import pytest

from offload_core.runtime.metrics import HISTOGRAMS
from tests.standin.rig import Rig
from tests.support.standin.engine import StandInEngine
from tests.support.standin.geometries import MODELS

TIGHT = {"name": "ram", "type": "cpu", "capacity": "2MiB"}


def counts(engine: StandInEngine, tier: str, *names: str) -> list[float]:
    return [engine.counters[f"{name}|{tier}"] for name in names]


@pytest.mark.parametrize("ranks", [1, 2])
def test_requests_count_once_and_objects_once_per_rank(rig: Rig, ranks: int) -> None:
    model = MODELS["gemma3"]()
    boundary = 2 * model.chunk_tokens
    prompts = [[3 + (i * family + family) % 997 for i in range(boundary + 5)] for family in (1, 2, 3)]
    first = rig.engine(model, ranks=ranks)
    rig.run(first, *prompts[:2])
    assert counts(first, "disk", "queries", "query_hits", "query_misses", "hit_tokens") == [2, 0, 2, 0]
    stored = first.counters["stores|disk"]
    rig.end(first)

    second = rig.engine(model, ranks=ranks)
    rig.run(second, *prompts)
    assert counts(second, "disk", "queries", "query_hits", "query_misses", "hit_tokens") == [3, 2, 1, 2 * boundary]
    assert stored % ranks == second.counters["load_hits|disk"] % ranks == 0
    for name in HISTOGRAMS:
        buckets = [key for key in second.counters if key.startswith(f"{name}:") and key.endswith("|disk")]
        calls = sum(second.counters[key] for key in buckets if ":sum" not in key)
        assert calls >= (1 if name == "lookup_seconds" else ranks), name
        assert all(f"{key.split('|')[0]}:sum|disk" in buckets for key in buckets if ":sum" not in key)


@pytest.mark.parametrize("ranks", [1, 2])
def test_evictions_and_those_never_read_are_counted(rig: Rig, ranks: int) -> None:
    model = MODELS["gemma3"]()
    engine = rig.engine(model, ranks=ranks, backends=[TIGHT])
    for family in range(1, 9):
        rig.run(engine, [3 + (i * family + family) % 997 for i in range(4 * model.chunk_tokens + 5)])
    evicted, unread, unread_bytes, stored, nbytes = counts(
        engine, "ram", "evictions", "evictions_unread", "evictions_unread_bytes", "stores", "store_bytes"
    )
    assert 0 < evicted < stored
    assert unread == evicted, "no prompt came again"
    assert 0 < unread_bytes < nbytes


def test_an_aborted_request_is_not_recomputed(rig: Rig) -> None:
    model = MODELS["gemma3"]()
    prompt = [3 + i % 997 for i in range(2 * model.chunk_tokens + 5)]
    engine = rig.engine(model)
    rig.run(engine, prompt)
    assert engine.scheduler.reset_prefix_cache()
    rig.script.shut.add("load_into")
    request = engine.add(prompt, 4)
    rig.step_until(engine, lambda: engine.states().get(request) == "WAITING_FOR_REMOTE_KVS")
    engine.abort(request)
    rig.drain(engine)
    assert counts(engine, "disk", "jobs_cancelled", "jobs_failed") == [1, 0]
    assert counts(engine, "all", "recomputed_requests") == [0]
