"""The simulator, compared with a program that knows only definitions."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.planning.placement import PlacementPolicy
from offload_core.planning.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner
from offload_core.simulation.bounded_tier import BoundedTier
from offload_core.simulation.path_rules import PLACEMENTS, path_rules
from offload_core.simulation.runs import Run, Subject, TierRules
from offload_core.simulation.simulator import Simulation, SimulationResult
from offload_core.simulation.tier_stack import TierStack
from tests.core.simulation.brute_force import BruteForce, SimpleTier
from tests.support.geometries import FULL, STATE, Geometry, geometries, window
from tests.support.prompt_traces import Tokens, conversations, trace_of
from tests.support.random_examples import examples
from tests.support.workload import random_workload


@st.composite
def prompts(draw: st.DrawFn) -> list[Tokens]:
    """Prompts of which many begin as an earlier one does."""
    made: list[Tokens] = [()]
    for _ in range(draw(st.integers(1, 10))):
        before = draw(st.sampled_from(made))
        head = before[: draw(st.integers(0, len(before)) | st.just(len(before)))]
        made.append(head + tuple(draw(st.lists(st.integers(0, 1), min_size=1, max_size=40))))
    return made[1:]


def simulated(
    planner: HybridOffloadPlanner,
    prompts: list[Tokens],
    placement: PlacementPolicy,
    *,
    capacity: int | None = None,
    block_tokens: int = 1,
    sizes: dict[str, int] | None = None,
    eviction: Any = "lru",
) -> SimulationResult:
    sizes = sizes or dict.fromkeys((pack.name for pack in planner.packs), 1)
    simulation = Simulation(
        planner,
        sizes,
        block_tokens,
        TierStack.of_one(BoundedTier(capacity, eviction)),
        path_rules(placement, planner, sizes),
    )
    for request in trace_of(prompts, block_tokens).requests:
        simulation.serve(request)
    return simulation.result


@examples(600)
@given(geometries(), prompts(), st.sampled_from(PLACEMENTS), st.none() | st.integers(1, 60), st.data())
def test_the_simulator_agrees_with_brute_force(
    geometry: Geometry, prompts: list[Tokens], placement: PlacementPolicy, capacity: int | None, data: st.DataObject
) -> None:
    planner = geometry.plan()
    sizes = {pack.name: data.draw(st.integers(1, 4), label=pack.name) for pack in planner.packs}
    compare(planner, prompts, placement, capacity, data.draw(st.integers(1, 6), label="block_tokens"), sizes)


def test_objects_behind_the_last_boundary_are_stored_and_not_touched() -> None:
    planner = Geometry((GroupGeometry(0, 1, FULL), GroupGeometry(1, 4, FULL)), 1, 3).plan()  # a boundary each 12 tokens
    sizes = dict.fromkeys((pack.name for pack in planner.packs), 1)
    compare(planner, [(0,) * 6, (0,) * 4], "everything", 2, 1, sizes)


@pytest.mark.parametrize("policy", [window(5), STATE], ids=str)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("capacity", [20, 30, 45, 70])
@pytest.mark.parametrize("seed", range(3))
def test_the_simulator_agrees_with_brute_force_on_conversations_under_a_limit(
    policy: HitPolicy, placement: PlacementPolicy, capacity: int, seed: int
) -> None:
    groups = (GroupGeometry(0, 2, FULL), GroupGeometry(1, 2, policy))
    planner = Geometry(groups, 2, 2).plan()
    sizes = {pack.name: 1 if pack.policy.kind == "full" else 2 for pack in planner.packs}
    compare(planner, conversations(4, 5, 6, seed), placement, capacity, 2, sizes)


def tree(seed: int, block: int) -> list[Tokens]:
    """Prompts that part from each other anywhere and seldom come back to an end."""
    workload = random_workload(seed, requests=40, segment_tokens=16 * block, max_prompt_tokens=87 * block)
    return [tuple(request.token_ids) for request in workload.requests]


@pytest.mark.parametrize("policy", [window(32), STATE], ids=str)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("seed", range(2))
def test_the_simulator_agrees_with_brute_force_on_trees_under_a_limit(
    policy: HitPolicy, placement: PlacementPolicy, seed: int
) -> None:
    planner = Geometry((GroupGeometry(0, 1, FULL), GroupGeometry(1, 1, policy)), 1, 8).plan()
    sizes = {pack.name: 1 if pack.policy.kind == "full" else 5 for pack in planner.packs}
    compare(planner, tree(seed, 1), placement, 250, 1, sizes)


@pytest.mark.parametrize("policy", [window(512), STATE], ids=str)
@pytest.mark.parametrize("share", [0.5, 0.25, 0.1])
def test_on_trees_under_a_limit_kept_boundaries_serve_more_with_fewer_writes(policy: HitPolicy, share: float) -> None:
    block = 128 if policy == STATE else 16
    groups = [GroupGeometry(0, 16, FULL), GroupGeometry(1, block, policy)]
    planner = HybridOffloadPlanner.build(groups, hash_block_size=16, max_model_len=2048, hybrid_chunk_size=128)
    sizes = {pack.name: {"full": 1, "window": 5, "state": 10}[pack.policy.kind] for pack in planner.packs}
    kept: list[SimulationResult] = []
    everything: list[SimulationResult] = []
    for prompts in (tree(seed, 16) for seed in range(20)):
        unlimited = simulated(planner, prompts, "everything", block_tokens=16, sizes=sizes)
        capacity = int(share * unlimited.traffic.peak_bytes)
        for placement, results in (("kept and spare", kept), ("everything", everything)):
            results.append(
                simulated(planner, prompts, placement, capacity=capacity, block_tokens=16, sizes=sizes)  # type: ignore[arg-type]
            )
    assert sum(result.hit_tokens for result in kept) > sum(result.hit_tokens for result in everything)
    written, written_everything = (
        sum(result.traffic.written_bytes for result in results) for results in (kept, everything)
    )
    assert written < 0.7 * written_everything


def compare(
    planner: HybridOffloadPlanner,
    prompts: list[Tokens],
    placement: PlacementPolicy,
    capacity: int | None,
    block_tokens: int,
    sizes: dict[str, int],
) -> None:
    tier = SimpleTier(capacity, sizes)
    oracle = BruteForce(planner, [tier], placement, block_tokens)
    for prompt in prompts:
        oracle.serve(prompt)
    found = simulated(planner, prompts, placement, capacity=capacity, block_tokens=block_tokens, sizes=sizes)
    assert (found.hit_tokens, found.input_tokens) == (sum(oracle.hits), sum(map(len, prompts)))
    assert astuple(found.traffic) == (
        len(tier.written), tier.bytes_of(tier.written), len(tier.read), tier.bytes_of(tier.read),
        len(tier.evicted), tier.bytes_of(tier.evicted), tier.peak,
    )  # fmt: skip


RULES = st.builds(
    TierRules,
    eviction=st.just("lru"),  # the oracle knows no other
    capacity_bytes=st.none() | st.integers(1, 60),
    write_policy=st.sampled_from(["every", "second-touch", "never"]),
    promote=st.booleans(),
    load_weight=st.sampled_from([0.5, 1.0, 2.0]),
    low_watermark=st.sampled_from([0.5, 0.9]),
    high_watermark=st.sampled_from([0.9, 1.0]),
)


@examples(400)
@given(geometries(), prompts(), st.sampled_from(PLACEMENTS), st.lists(RULES, min_size=2, max_size=3), st.data())
def test_several_tiers_agree_with_brute_force(
    geometry: Geometry, prompts: list[Tokens], placement: PlacementPolicy, rules: list[TierRules], data: st.DataObject
) -> None:
    planner = geometry.plan()
    sizes = {pack.name: data.draw(st.integers(1, 4), label=pack.name) for pack in planner.packs}
    tiers = [
        SimpleTier(
            rule.capacity_bytes, sizes, rule.write_policy, rule.promote, rule.load_weight,
            rule.low_watermark, rule.high_watermark,
        )
        for rule in rules
    ]  # fmt: skip
    oracle = BruteForce(planner, tiers, placement, 1)
    for prompt in prompts:
        oracle.serve(prompt)
    named = tuple(rule._replace(name=str(place)) for place, rule in enumerate(rules))
    subject = Subject(trace_of(prompts, 1), planner, sizes)
    found = subject.simulate(Run(placement, named), lambda _: False)
    assert found.hit_tokens == sum(oracle.hits) == sum(counts.hit_tokens for counts in found.tiers.values())
    for counts, tier in zip(found.tiers.values(), tiers, strict=True):
        assert astuple(counts.traffic) == (
            len(tier.written), tier.bytes_of(tier.written), len(tier.read), tier.bytes_of(tier.read),
            len(tier.evicted), tier.bytes_of(tier.evicted), tier.peak,
        )  # fmt: skip


@given(geometries(), prompts(), st.integers(1, 6), st.sampled_from(["lru", "slru"]))
def test_without_a_limit_spare_objects_serve_as_much_as_everything(
    geometry: Geometry, prompts: list[Tokens], block_tokens: int, eviction: str
) -> None:
    planner = geometry.plan()
    spare, everything = (
        simulated(planner, prompts, placement, block_tokens=block_tokens, eviction=eviction)
        for placement in ("kept and spare", "everything")
    )
    assert spare.hit_tokens == everything.hit_tokens
    assert spare.traffic.written_bytes == everything.traffic.written_bytes
    assert spare.traffic.evicted_objects == 0


def hybrid(*others: Any) -> HybridOffloadPlanner:
    groups = [GroupGeometry(index, 16, policy) for index, policy in enumerate((FULL, *others))]
    return HybridOffloadPlanner.build(groups, hash_block_size=16, max_model_len=4096, hybrid_chunk_size=16)


@pytest.mark.parametrize("policy", [window(64), STATE], ids=str)
def test_under_a_limit_kept_boundaries_serve_more_with_fewer_writes(policy: Any) -> None:
    planner = hybrid(policy)
    sizes = {pack.name: 1 if pack.policy.kind == "full" else 4 for pack in planner.packs}
    prompts = conversations(12, 10, 64)
    kept, everything = (
        simulated(planner, prompts, placement, capacity=600, sizes=sizes)
        for placement in ("kept and spare", "everything")
    )
    assert kept.hit_rate > everything.hit_rate
    assert kept.traffic.written_bytes < everything.traffic.written_bytes / 2
    assert kept.traffic.peak_bytes <= 600


def test_a_junction_hits_from_its_second_sight_on() -> None:
    planner = hybrid(STATE)
    head = tuple(range(64))
    paths = [head + tuple(range(100 * n, 100 * n + 64)) for n in range(1, 4)]
    hits = [simulated(planner, paths[: n + 1], "kept").hit_tokens for n in range(3)]
    assert hits == [0, 0, 64]


def test_a_request_longer_than_the_model_allows_is_left_out() -> None:
    result = simulated(hybrid(), [tuple(range(4097)), tuple(range(4096))], "kept")
    assert (result.refused_requests, result.requests, result.input_tokens) == (1, 1, 4096)


def test_an_object_larger_than_the_capacity_is_not_stored() -> None:
    result = simulated(hybrid(), [tuple(range(32))] * 2, "everything", capacity=1, sizes={"full-u16": 2})
    assert (result.hit_tokens, result.traffic.written_objects) == (0, 0)


def test_no_request_gives_a_hit_rate_of_zero() -> None:
    assert simulated(hybrid(), [], "kept").hit_rate == 0
