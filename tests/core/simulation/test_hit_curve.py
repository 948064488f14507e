"""The live curve: without sampling it is the simulator, with sampling it is near, and its memory has a limit."""

from __future__ import annotations

import math
import random
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.live_curve import serve
from offload_core.api.eviction_order import EvictionPolicy
from offload_core.planning.placement import PlacementPolicy
from offload_core.planning.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner
from offload_core.simulation import hit_curve
from offload_core.simulation.hit_curve import FACTORS, MAX_KEPT, MAX_MEMORY_BYTES, MAX_SAMPLES, HitCurve
from tests.core.simulation.test_simulator import hybrid, prompts, simulated
from tests.support.geometries import FULL, STATE, chunked, window
from tests.support.prompt_traces import Tokens, conversations, trace_of
from tests.support.random_examples import examples

SAMPLED: tuple[PlacementPolicy, ...] = ("kept and spare", "kept")


def plan(policies: Sequence[HitPolicy], block: int = 1) -> HybridOffloadPlanner:
    groups = [GroupGeometry(index, block, policy) for index, policy in enumerate(policies)]
    return HybridOffloadPlanner.build(groups, hash_block_size=block, max_model_len=1 << 20, hybrid_chunk_size=block)


def estimated(
    planner: HybridOffloadPlanner,
    prompts: list[Tokens],
    capacity: int,
    sizes: dict[str, int],
    placement: PlacementPolicy = "kept and spare",
    eviction: EvictionPolicy = "lru",
    *,
    block_tokens: int = 1,
    max_samples: int = MAX_SAMPLES,
) -> HitCurve:
    curve = HitCurve(planner, sizes, capacity, placement, eviction, max_samples=max_samples)
    serve(curve, trace_of(prompts, block_tokens), planner)
    return curve


@examples(200)
@given(
    st.sampled_from([(FULL,), (FULL, STATE), (STATE,), (FULL, window(2)), (window(2),)]),
    prompts(),
    st.sampled_from(SAMPLED),
    st.integers(2, 60),
    st.sampled_from(["lru", "slru"]),
    st.data(),
)
def test_without_sampling_the_curve_is_the_simulator(
    policies: Sequence[HitPolicy],
    prompts: list[Tokens],
    placement: PlacementPolicy,
    capacity: int,
    eviction: EvictionPolicy,
    data: st.DataObject,
) -> None:
    planner = plan(policies)
    sizes = {pack.name: data.draw(st.integers(1, 4), label=pack.name) for pack in planner.packs}
    curve = estimated(planner, prompts, capacity, sizes, placement, eviction)
    assert curve.rate == 1
    for factor, ratio in zip(FACTORS, curve.hit_ratios(), strict=True):
        limit = int(capacity * factor)
        true = simulated(planner, prompts, placement, capacity=limit, sizes=sizes, eviction=eviction)
        assert ratio == pytest.approx(true.hit_rate)


@pytest.mark.parametrize("policies", [(FULL,), (FULL, window(65)), (FULL, chunked(64)), (FULL, STATE)], ids=str)
def test_with_sampling_the_curve_is_within_three_points_of_the_simulator(policies: Sequence[HitPolicy]) -> None:
    planner = plan(policies, 16)
    sizes = {pack.name: 1000 if pack.policy.kind == "full" else 3000 for pack in planner.packs}
    texts, capacity = conversations(60, 8, 80), 300_000
    curve = estimated(planner, texts, capacity, sizes, block_tokens=16, max_samples=500)
    assert curve.rate < 0.5
    for factor, ratio in zip(FACTORS, curve.hit_ratios(), strict=True):
        limit = int(capacity * factor)
        true = simulated(planner, texts, "kept and spare", capacity=limit, sizes=sizes, block_tokens=16).hit_rate
        assert ratio == pytest.approx(true, abs=0.03), factor


@pytest.mark.parametrize("policy", [window(65), STATE], ids=str)
def test_with_sampling_spare_objects_serve_while_there_is_free_capacity(policy: HitPolicy) -> None:
    planner = plan((FULL, policy), 16)
    sizes = {pack.name: 1000 if pack.policy.kind == "full" else 3000 for pack in planner.packs}
    chance = random.Random(3)
    texts: list[Tokens] = []
    for _ in range(60):
        text = tuple(chance.randrange(1 << 30) for _ in range(640))
        parted = chance.randrange(160, 640)
        texts += [text, text[:parted] + tuple(chance.randrange(1 << 30) for _ in range(640 - parted))]
    capacity = 60 * 40 * 2 * 4000
    curve = estimated(planner, texts, capacity, sizes, block_tokens=16, max_samples=3000)
    assert curve.rate < 0.5
    true = simulated(planner, texts, "kept and spare", capacity=capacity, sizes=sizes, block_tokens=16).hit_rate
    assert true > 0.25
    assert curve.hit_ratios()[1:] == pytest.approx([true] * 3, abs=0.03)


def random_paths(curve: HitCurve, count: int, chunks: int) -> None:
    chance = random.Random(1)
    for _ in range(count):
        curve.serve([chance.getrandbits(64) for _ in range(chunks)], chunks, chunks, 0)


def test_the_memory_has_a_limit() -> None:
    part = 32
    planner = hybrid(window(64))
    sizes = dict.fromkeys((pack.name for pack in planner.packs), 1)
    tracemalloc.start()
    try:
        curve = HitCurve(
            planner, sizes, 1 << 40, "kept and spare", "lru",
            max_samples=MAX_SAMPLES // part, max_kept=MAX_KEPT // part,
        )  # fmt: skip
        random_paths(curve, 3 * MAX_KEPT // part, 8)
        current, _ = tracemalloc.get_traced_memory()
        random_paths(curve, MAX_KEPT // part, 8)
        later, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert later < current * 1.05, "it does not grow any more"
    assert peak * part < MAX_MEMORY_BYTES


def test_a_capacity_with_more_boundaries_than_the_curve_can_hold_has_no_estimate() -> None:
    planner = hybrid(STATE)
    sizes = dict.fromkeys((pack.name for pack in planner.packs), 1)
    curve = HitCurve(planner, sizes, 100, "kept", "lru", max_samples=50, max_kept=80)
    random_paths(curve, 200, 4)
    assert [math.isnan(ratio) for ratio in curve.hit_ratios()] == [False, False, False, True]


def test_old_requests_count_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hit_curve, "WINDOW_REQUESTS", 8)
    curve = HitCurve(plan([FULL]), {"full-u1": 1}, 1000, "kept and spare", "lru")
    path = [number << 56 for number in range(10)]
    for _ in range(4):
        curve.serve([name + 1 for name in path], 10, 9, 0)  # new, although the same names come again: none was seen
    misses = curve.hit_ratios()
    for _ in range(40):
        curve.serve(path, 10, 9, 10)
    assert misses[0] < 0.9
    assert curve.hit_ratios()[0] == pytest.approx(0.9, abs=0.01)


def test_before_the_first_request_there_are_no_hits() -> None:
    assert HitCurve(plan([FULL]), {"full-u1": 1}, 10, "kept", "lru").hit_ratios() == [0.0] * len(FACTORS)
