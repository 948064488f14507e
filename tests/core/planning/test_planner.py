"""Units, packs, boundaries and slices against oracles that walk tokens one by one."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from offload_core.planning import planner as planner_module
from offload_core.planning.packs import usable_reference_blocks
from offload_core.planning.planner import GroupGeometry, HitPolicy
from tests.support.geometries import FULL, STATE, Geometry, chunked, geometries, needs, window


@given(geometry=geometries(), data=st.data())
def test_the_units_to_load_are_those_that_hold_a_needed_token(geometry: Geometry, data: st.DataObject) -> None:
    planner = geometry.plan()
    boundary = planner.boundary_tokens * data.draw(st.integers(1, 4))
    assume(boundary <= 2000)
    computed = data.draw(st.integers(0, boundary))
    for pack in planner.packs:
        needed = [token for token in range(computed, boundary) if needs(pack.policy, token, boundary)]
        assert list(pack.needed_units(computed, boundary)) == sorted({token // pack.unit_tokens for token in needed})


@given(geometry=geometries(), data=st.data())
def test_the_stored_blocks_hold_every_needed_token(geometry: Geometry, data: st.DataObject) -> None:
    planner = geometry.plan()
    boundary = planner.boundary_tokens * data.draw(st.integers(1, 4))
    assume(boundary <= 2000)
    computed = data.draw(st.integers(0, boundary))
    for pack in planner.packs:
        for group in pack.groups:
            loaded = {
                block for unit in pack.needed_units(computed, boundary) for block in pack.block_range(group, unit)
            }
            needed = {
                token // group.block_size_tokens
                for token in range(computed, boundary)
                if needs(pack.policy, token, boundary)
            }
            assert needed <= loaded


@given(geometry=geometries(), unit=st.integers(0, 5))
def test_a_unit_stores_those_of_its_own_blocks_that_a_boundary_needs(geometry: Geometry, unit: int) -> None:
    for pack in geometry.plan().packs:
        start, end = unit * pack.unit_tokens, (unit + 1) * pack.unit_tokens
        for group in pack.groups:
            held = pack.block_range(group, unit)
            assert len(held) == pack.stored_blocks(group)
            own = {token // group.block_size_tokens for token in range(start, end)}
            needed = {token // group.block_size_tokens for token in range(start, end) if needs(pack.policy, token, end)}
            if pack.policy.kind == "chunked":  # the boundaries after it in the same attention chunk need the whole unit
                needed = own
            assert set(held) == needed
            assert held
            assert needed <= own


@given(geometry=geometries())
def test_a_unit_is_the_chunk_where_blocks_fit_into_it_and_else_the_block(geometry: Geometry) -> None:
    planner = geometry.plan()
    assert geometry.hybrid_chunk_size in (None, planner.hybrid_chunk_size)
    units = {g.index: geometry.unit_tokens(g, planner.hybrid_chunk_size) for g in geometry.groups}
    assert all(pack.unit_tokens == units[group.index] for pack in planner.packs for group in pack.groups)
    hash_block = geometry.hash_block_size
    assert {index: factor * hash_block for index, factor in planner.group_hash_factors.items()} == units


@given(geometry=geometries())
def test_each_group_is_in_one_pack_or_no_boundary_needs_any_of_it(geometry: Geometry) -> None:
    planner = geometry.plan()
    packs = planner.packs
    without = [group.index for group in planner.groups_without_objects]
    packed = [group.index for pack in packs for group in pack.groups]
    assert sorted(packed + without) == list(range(len(geometry.groups)))
    assert len({pack.name for pack in packs}) == len(packs)
    assert len({(pack.unit_tokens, pack.policy) for pack in packs}) == len(packs)
    assert all(group.policy == pack.policy for pack in packs for group in pack.groups)
    boundaries = range(planner.boundary_tokens, min(1000, 50 * planner.boundary_tokens), planner.boundary_tokens)
    for group in planner.groups_without_objects:
        assert not any(needs(group.policy, token, boundary) for boundary in boundaries for token in range(boundary))


@given(geometry=geometries(), tokens=st.integers(0, 3000))
def test_a_boundary_is_where_a_unit_of_every_group_ends(geometry: Geometry, tokens: int) -> None:
    planner = geometry.plan()
    ends = [
        end
        for end in range(tokens + 1)
        if all(end % geometry.unit_tokens(group, planner.hybrid_chunk_size) == 0 for group in geometry.groups)
    ]
    assert planner.storable_prefix(tokens) == ends[-1]
    assert planner.chunk_count(tokens) == len(ends) - 1
    assert [planner.covered_tokens(chunks) for chunks in range(len(ends))] == ends


@given(geometry=geometries())
def test_counts_and_tokens_round_trip_for_every_token_count(geometry: Geometry) -> None:
    planner = geometry.plan()
    for tokens in range(500):
        chunks = planner.chunk_count(tokens)
        assert planner.chunk_count(planner.covered_tokens(tokens)) == tokens
        assert planner.covered_tokens(chunks) <= tokens < planner.covered_tokens(chunks + 1)
        for pack in planner.packs:
            units = pack.units_in(tokens)
            assert pack.units_in(pack.tokens_in(tokens)) == tokens
            assert pack.tokens_in(units) <= tokens < pack.tokens_in(units + 1)


@given(geometry=geometries())
def test_the_first_hashable_chunk_is_the_first_that_ends_after_a_unit_of_every_group(geometry: Geometry) -> None:
    planner = geometry.plan()
    chunk = planner.hybrid_chunk_size
    units = [geometry.unit_tokens(group, chunk) for group in geometry.groups]
    index = next(index for index in range(1000) if all((index + 1) * chunk >= unit for unit in units))
    assert planner.first_hashable_chunk_idx == index


sizes = st.integers(1, 40)


@given(block=sizes, reference=sizes, start=st.integers(0, 20), count=st.integers(0, 20))
def test_a_slice_claims_the_blocks_that_end_in_it(block: int, reference: int, start: int, count: int) -> None:
    stop = start + count
    claimed = GroupGeometry(0, block, FULL).block_slice(reference, start, stop)
    ends = {position: (position + 1) * block - 1 for position in range(stop * reference // block + 2)}
    inside = range(start * reference, stop * reference)
    assert list(claimed) == [position for position, last_token in ends.items() if last_token in inside]


@pytest.mark.parametrize(
    ("block", "start", "stop", "positions"),
    [
        (64, 4, 12, range(1, 3)),
        (64, 0, 3, range(0)),
        (64, 3, 7, range(1)),
        (16, 3, 5, range(3, 5)),
        (4, 3, 5, range(12, 20)),
    ],
)
def test_slices_of_reference_blocks_of_16_divide_or_multiply(
    block: int, start: int, stop: int, positions: range
) -> None:
    assert GroupGeometry(0, block, FULL).block_slice(16, start, stop) == positions


@given(groups=st.lists(st.tuples(sizes, st.integers(0, 12)), min_size=1, max_size=4), reference=sizes)
def test_usable_reference_blocks_are_those_whose_tokens_every_group_has(
    groups: list[tuple[int, int]], reference: int
) -> None:
    def held_by_all(token: int) -> bool:
        return all(token // block < count for block, count in groups)

    tokens = next(token for token in range(1000) if not held_by_all(token))
    geometry = [GroupGeometry(index, block, FULL) for index, (block, _) in enumerate(groups)]
    assert usable_reference_blocks(geometry, [count for _, count in groups], reference) == tokens // reference


@given(data=st.data())
def test_i7_packs_of_one_name_have_the_same_groups_with_every_chunk_size(data: st.DataObject) -> None:
    """Engines that differ in ``hybrid_chunk_size`` only have one fingerprint."""
    geometry = data.draw(geometries())
    block = st.sampled_from([group.block_size_tokens for group in geometry.groups])
    chunks = st.tuples(block, st.sampled_from((1, 2, 3))).map(lambda drawn: drawn[0] * drawn[1])
    other = geometry.with_chunk(data.draw(chunks))
    assume(other.works())
    packs = {pack.name: pack for pack in geometry.plan().packs}
    for pack in other.plan().packs:
        if (namesake := packs.get(pack.name)) is not None:
            assert pack == namesake


def test_i7_a_pack_without_all_groups_of_its_policy_has_a_name_of_its_own() -> None:
    groups = tuple(GroupGeometry(index, block, FULL) for index, block in enumerate((256, 64, 64, 4, 8)))
    names = {chunk: [pack.name for pack in Geometry(groups, 4, chunk).plan().packs] for chunk in (1024, 256, 128)}
    assert names == {1024: ["full-u1024"], 256: ["full-u256"], 128: ["full-u256-g1", "full-u128-g1e"]}


def test_a_group_without_blocks_leaves_no_reference_block_usable() -> None:
    groups = [GroupGeometry(0, 16, FULL), GroupGeometry(1, 64, FULL)]
    assert usable_reference_blocks(groups, [8, 2], 16) == 8
    assert usable_reference_blocks(groups, [8, 0], 16) == 0
    assert usable_reference_blocks([], [], 16) == 0
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        usable_reference_blocks(groups, [8], 16)


def test_the_examples_of_the_module_are_true() -> None:
    results = doctest.testmod(planner_module)
    assert results.attempted > 20
    assert results.failed == 0


@given(geometry=geometries(), unit=st.integers(0, 50))
def test_a_unit_is_named_by_the_hash_of_the_block_that_holds_its_last_token(geometry: Geometry, unit: int) -> None:
    for pack in geometry.plan().packs:
        last_token = (unit + 1) * pack.unit_tokens - 1
        assert pack.hash_index(unit) == last_token // geometry.hash_block_size
        assert (pack.hash_index(unit) + 1) * geometry.hash_block_size == last_token + 1


@pytest.mark.parametrize(
    ("policy", "boundary", "first"),
    [
        (FULL, 100, 0),
        (window(1), 100, 100),
        (window(10), 100, 91),
        (window(200), 100, 0),
        (STATE, 100, 99),
        (chunked(8), 15, 8),
        (chunked(8), 16, 16),
    ],
    ids=str,
)
def test_first_needed_token(policy: HitPolicy, boundary: int, first: int) -> None:
    assert policy.first_needed_token(boundary) == first
