"""The numbers of a plan against a walk over tokens that knows only the definition of a hit."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.api.errors import PlanError
from offload_core.cli.plan_report import PlanReport, plan_report
from offload_core.config.geometry_file import KVCacheGeometry
from offload_core.objects.format import HEADER_BYTES
from offload_core.planning.planner import GroupGeometry
from tests.core.config.test_geometry_file import saved
from tests.support.geometries import FULL, Geometry, chunked, geometries, needs
from tests.support.random_examples import examples

PAGE_BYTES = 64


def stored(model: Geometry, chunk: int, tokens: int) -> tuple[int, int]:
    """Objects and bytes that ``tokens`` tokens leave: blocks of every unit that a boundary within reach needs."""
    units = {group: model.unit_tokens(group, chunk) for group in model.groups}
    distance = math.lcm(*units.values())
    reach = max([distance, *(group.policy.attention_chunk_tokens for group in model.groups)])
    blocks: dict[tuple[object, int, int], int] = {}
    for group, unit in units.items():
        for end in range(unit, tokens + 1, unit):
            own = range(end - unit, end)
            boundaries = range(-(-end // distance) * distance, end + 2 * reach, distance)
            if not any(needs(group.policy, token, boundary) for boundary in boundaries for token in own):
                continue
            kept = [t for t in own if group.policy.kind == "chunked" or needs(group.policy, t, end)]
            held = len({token // group.block_size_tokens for token in kept})
            place = (group.policy, unit, end)
            blocks[place] = blocks.get(place, 0) + held * PAGE_BYTES * (group.index + 1)
    return len(blocks), sum(blocks.values()) + len(blocks) * HEADER_BYTES


@examples(100)
@given(model=geometries(), ranks=st.integers(1, 3))
def test_objects_and_bytes_per_1000_tokens_are_those_of_a_walk_over_all_units(model: Geometry, ranks: int) -> None:
    geometry = saved(model, PAGE_BYTES).model_copy(update={"ranks": ranks, "max_model_len": 2000})
    try:
        report = plan_report(geometry, model.hybrid_chunk_size, prompt_tokens=100)
    except PlanError:  # the first boundary lies above 2,000 tokens
        return
    objects, nbytes = stored(model, report.hybrid_chunk_size, report.prompt_tokens)
    assert report.objects_per_1000_tokens == pytest.approx(ranks * objects * 1000 / report.prompt_tokens)
    assert report.bytes_per_1000_tokens == pytest.approx(ranks * nbytes * 1000 / report.prompt_tokens)
    assert report.objects_per_1000_tokens == sum(pack.objects_per_1000_tokens for pack in report.packs)
    assert report.bytes_per_1000_tokens == sum(pack.bytes_per_1000_tokens for pack in report.packs)


@given(model=geometries())
def test_the_report_tells_the_plan(model: Geometry) -> None:
    planner = model.plan()
    report = plan_report(saved(model), model.hybrid_chunk_size, prompt_tokens=1)
    assert report.boundary_tokens == planner.boundary_tokens
    assert report.prompt_tokens % planner.boundary_tokens == 0
    assert report.warnings == planner.warnings
    assert [(p.name, p.unit_tokens, p.groups) for p in report.packs] == [
        (pack.name, pack.unit_tokens, tuple(group.index for group in pack.groups)) for pack in planner.packs
    ]
    assert {group.index: group.hash_factor for group in report.groups} == planner.group_hash_factors
    without = {group.index for group in planner.groups_without_objects}
    assert {group.index for group in report.groups if group.pack is None} == without
    assert all((group.blocks_per_object == 0) == (group.index in without) for group in report.groups)
    for pack in planner.packs:
        for group in pack.groups:
            of_group = report.groups[group.index]
            assert (of_group.pack, of_group.blocks_per_object) == (pack.name, pack.stored_blocks(group))


@given(model=geometries(), lookahead_tokens=st.integers(0, 40), tails=st.booleans())
def test_the_shortest_served_prompt_is_the_first_with_a_hit(
    model: Geometry, lookahead_tokens: int, tails: bool
) -> None:
    geometry = saved(model).model_copy(update={"lookahead_tokens": lookahead_tokens, "tails": tails})
    planner = geometry.planner(model.hybrid_chunk_size)
    shortest = plan_report(geometry, model.hybrid_chunk_size, prompt_tokens=1).shortest_served_prompt_tokens
    assert max(planner.replay_boundary(shortest - 1), planner.tail_end(shortest - 1)) == 0
    first = planner.hash_block_size if planner.tail_packs else planner.boundary_tokens
    assert max(planner.replay_boundary(shortest), planner.tail_end(shortest)) == first


@given(model=geometries())
def test_the_default_that_a_report_names_is_the_one_that_the_planner_takes(model: Geometry) -> None:
    report = plan_report(saved(model), model.hybrid_chunk_size, prompt_tokens=1)
    default = report.default_hybrid_chunk_size
    if default is None:
        with pytest.raises(PlanError):
            model.with_chunk(None).plan()
    else:
        assert model.with_chunk(None).plan().hybrid_chunk_size == default


def _full(max_model_len: int) -> KVCacheGeometry:
    return saved(Geometry((GroupGeometry(0, 16, FULL),), 16, None)).model_copy(update={"max_model_len": max_model_len})


def test_the_prompt_is_never_longer_than_the_model_allows() -> None:
    assert plan_report(_full(1000), 256).prompt_tokens == 768
    assert plan_report(_full(1 << 20), 256).prompt_tokens == 100_096


def test_a_report_of_a_plan_that_is_refused_is_the_refusal() -> None:
    with pytest.raises(PlanError, match="max_model_len is 1000"):
        plan_report(_full(1000), 1024)


def _numbers(report: PlanReport) -> tuple[float, float]:
    return report.objects_per_1000_tokens, report.bytes_per_1000_tokens


def test_the_length_of_the_prompt_does_not_matter_where_it_has_whole_periods() -> None:
    assert _numbers(plan_report(_full(1 << 20), 256, 1)) == _numbers(plan_report(_full(1 << 20), 256, 100_000))


def test_the_prompt_ends_where_an_attention_chunk_ends_so_that_the_last_one_counts_as_much_as_the_others() -> None:
    groups = (GroupGeometry(0, 16, FULL), GroupGeometry(1, 16, chunked(8192)))
    report = plan_report(saved(Geometry(groups, 16, 256)), 256, prompt_tokens=100)
    assert report.prompt_tokens == 8192
    full, local = (pack.objects_per_1000_tokens * 8.192 for pack in report.packs)
    assert full == pytest.approx(32)
    assert local == pytest.approx(31)  # nobody needs the unit that ends with its attention chunk
