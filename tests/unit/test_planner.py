"""The planner against oracles that walk tokens one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from offload_core.planner import HitPolicy, HybridOffloadPlanner, Pack
from tests.unit.geometries import FULL, STATE, Geometry, geometries, window


def needs(policy: HitPolicy, token: int, boundary: int) -> bool:
    """The definition of a hit: does going on from ``boundary`` read what ``token`` left in the cache?"""
    if policy.kind == "full":
        return True
    if policy.kind == "state":
        return token == boundary - 1
    return token > boundary - policy.window_tokens


def deepest_usable(
    planner: HybridOffloadPlanner, present: Mapping[str, Sequence[bool]], computed: int, limit: int
) -> int:
    def there(pack: Pack, token: int) -> bool:
        flags = present.get(pack.name, ())
        index = token // pack.unit_tokens - computed // pack.unit_tokens
        return index < len(flags) and flags[index]

    for boundary in range(limit, computed, -1):
        if all(boundary % pack.unit_tokens == 0 for pack in planner.packs) and all(
            there(pack, token)
            for pack in planner.packs
            for token in range(computed, boundary)
            if needs(pack.policy, token, boundary)
        ):
            return boundary
    return computed


@st.composite
def presence(draw: st.DrawFn, planner: HybridOffloadPlanner, computed: int, limit: int) -> dict[str, list[bool]]:
    """Draw what is stored: mostly everything, with a few holes or an early end, sometimes nothing of a pack."""
    present: dict[str, list[bool]] = {}
    for pack in planner.packs:
        units = max(0, limit // pack.unit_tokens - computed // pack.unit_tokens)
        holes = draw(st.sets(st.integers(0, units), max_size=3))
        if draw(st.integers(0, 9)):
            end = draw(st.sampled_from((units + 2, units, units // 2)))
            present[pack.name] = [unit not in holes for unit in range(end)]
    return present


@settings(max_examples=600)
@given(geometry=geometries(), data=st.data())
def test_the_usable_prefix_is_neither_deeper_nor_shallower_than_the_definition(
    geometry: Geometry, data: st.DataObject
) -> None:
    planner = geometry.plan()
    limit = data.draw(st.integers(0, 240), label="limit")
    computed = data.draw(st.integers(0, limit), label="computed")
    present = data.draw(presence(planner, computed, limit), label="present")
    assert planner.usable_prefix(present, computed, limit) == deepest_usable(planner, present, computed, limit)


@given(geometry=geometries(), data=st.data())
def test_with_everything_stored_the_last_boundary_within_the_limit_is_usable(
    geometry: Geometry, data: st.DataObject
) -> None:
    planner = geometry.plan()
    limit = data.draw(st.integers(0, 1000))
    present = {pack.name: [True] * planner.storable_units(pack, limit) for pack in planner.packs}
    assert planner.usable_prefix(present, 0, limit) == limit - limit % planner.boundary_tokens


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
def test_a_unit_stores_only_blocks_of_its_own_that_its_end_needs(geometry: Geometry, unit: int) -> None:
    for pack in geometry.plan().packs:
        start, end = unit * pack.unit_tokens, (unit + 1) * pack.unit_tokens
        for group in pack.groups:
            held = pack.block_range(group, unit)
            assert len(held) == pack.stored_blocks(group)
            own = {token // group.block_size_tokens for token in range(start, end)}
            needed = {token // group.block_size_tokens for token in range(start, end) if needs(pack.policy, token, end)}
            if pack.policy == window(1):  # a window of one token looks back at nothing; an object cannot be empty
                needed = {max(own)}
            assert set(held) == needed
            assert needed <= own


@given(geometry=geometries(default_chunk=False))
def test_a_unit_is_the_chunk_where_blocks_fit_into_it_and_else_the_block(geometry: Geometry) -> None:
    chunk = geometry.hybrid_chunk_size
    assert chunk is not None
    unit_of = {group.index: pack.unit_tokens for pack in geometry.plan().packs for group in pack.groups}
    for group in geometry.groups:
        block = group.block_size_tokens
        assert unit_of[group.index] == (chunk if chunk % block == 0 else block)


@given(geometry=geometries())
def test_packs_hold_each_group_once_and_have_names_of_their_own(geometry: Geometry) -> None:
    packs = geometry.plan().packs
    assert sorted(group.index for pack in packs for group in pack.groups) == list(range(len(geometry.groups)))
    assert len({pack.name for pack in packs}) == len(packs)
    assert len({(pack.unit_tokens, pack.policy) for pack in packs}) == len(packs)
    assert all(group.policy == pack.policy for pack in packs for group in pack.groups)


@given(geometry=geometries(), unit=st.integers(0, 50))
def test_a_unit_is_named_by_the_hash_of_the_block_that_holds_its_last_token(geometry: Geometry, unit: int) -> None:
    for pack in geometry.plan().packs:
        last_token = (unit + 1) * pack.unit_tokens - 1
        assert pack.hash_index(unit) == last_token // geometry.hash_block_size
        assert (pack.hash_index(unit) + 1) * geometry.hash_block_size == last_token + 1


@given(geometry=geometries(), tokens=st.integers(0, 500))
def test_storable_units_are_those_that_end_within_the_tokens(geometry: Geometry, tokens: int) -> None:
    planner = geometry.plan()
    for pack in planner.packs:
        ends = [end for end in range(1, tokens + 1) if end % pack.unit_tokens == 0]
        assert planner.storable_units(pack, tokens) == len(ends)


@pytest.mark.parametrize(
    ("policy", "boundary", "first"),
    [(FULL, 100, 0), (window(1), 100, 100), (window(10), 100, 91), (window(200), 100, 0), (STATE, 100, 99)],
    ids=str,
)
def test_first_needed_token(policy: HitPolicy, boundary: int, first: int) -> None:
    assert policy.first_needed_token(boundary) == first
