"""Tails of prompts: their blocks, and the search for the deepest one, against an oracle that walks tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.planning.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner, Pack
from tests.support.geometries import FULL, STATE, chunked, drive, needs, window
from tests.support.random_examples import examples

There = Callable[[Pack, int], bool]


@st.composite
def _plans(draw: st.DrawFn) -> HybridOffloadPlanner:
    """Groups whose blocks divide one chunk."""
    hash_block_size = draw(st.sampled_from((1, 2)))
    blocks = st.sampled_from((1, 2, 4, 12, 24)).map(lambda factor: factor * hash_block_size)
    locals_ = st.sampled_from((48, 72)).map(lambda factor: chunked(factor * hash_block_size))
    policies = st.one_of(st.just(FULL), st.just(STATE), st.integers(2, 70).map(window), locals_)
    drawn = draw(st.lists(st.tuples(blocks, policies), min_size=1, max_size=4))
    groups = [GroupGeometry(index, block, policy) for index, (block, policy) in enumerate(drawn)]
    tail_tokens = draw(st.sampled_from((1, 2, 3, 4, 6))) * hash_block_size
    return HybridOffloadPlanner.build(
        groups,
        hash_block_size=hash_block_size,
        max_model_len=1 << 20,
        hybrid_chunk_size=24 * hash_block_size,
        tail_tokens=tail_tokens,
    )


def plans_with_tails() -> st.SearchStrategy[HybridOffloadPlanner]:
    return _plans().filter(lambda planner: planner.tail_packs)


def attention_depth(planner: HybridOffloadPlanner, there: There, computed: int, limit: int) -> int:
    """The deepest boundary up to which all full attention is there; ``computed`` if none is deeper."""
    full = [pack for pack in planner.packs if pack.policy == FULL]
    deepest = computed
    for boundary in range(planner.boundary_tokens, limit + 1, planner.boundary_tokens):
        if boundary > computed and all(
            there(pack, unit) for pack in full for unit in range(computed // pack.unit_tokens, pack.units_in(boundary))
        ):
            deepest = boundary
    return deepest


def held(planner: HybridOffloadPlanner, there: There, group: GroupGeometry, token: int, end: int) -> bool:
    """Whether a load to ``end`` would bring the group's entry of ``token``."""
    pack, tails = next(
        (pack, tails) for pack, tails in zip(planner.packs, planner.tail_packs, strict=True) if group in pack.groups
    )
    if token < end - end % planner.boundary_tokens:
        return there(pack, token // pack.unit_tokens)
    unit = end // tails.unit_tokens - 1
    return token // group.block_size_tokens in tails.block_range(group, unit) and there(tails, unit)


def deepest_tail(planner: HybridOffloadPlanner, there: There, computed: int, limit: int) -> int:
    """The deepest end within the chunk behind full attention whose needed tokens are all held; 0 if there is none."""
    depth = attention_depth(planner, there, computed, limit)
    step = planner.tail_packs[0].unit_tokens
    for end in range(limit, depth, -1):
        if end % step or end // planner.boundary_tokens != depth // planner.boundary_tokens:
            continue
        if all(
            held(planner, there, group, token, end)
            for pack in planner.packs
            for group in pack.groups
            for token in range(computed, end)
            if needs(group.policy, token, end)
        ):
            return end
    return 0


@examples(600)
@given(planner=plans_with_tails(), data=st.data())
def test_the_deepest_tail_is_found_if_all_groups_have_it(planner: HybridOffloadPlanner, data: st.DataObject) -> None:
    block = max(group.block_size_tokens for group in planner.groups)
    limit = data.draw(st.integers(0, 5 * planner.boundary_tokens))
    computed = data.draw(st.integers(0, limit // block)) * block
    units = st.tuples(st.sampled_from(planner.packs), st.integers(0, 4))
    missing = data.draw(st.sets(units, max_size=3))
    ends = st.tuples(st.sampled_from(planner.tail_packs), st.integers(0, 5 * planner.boundary_tokens))
    missing_tails = data.draw(st.sets(ends, max_size=8))

    def there(pack: Pack, unit: int) -> bool:
        return (pack, unit) not in (missing_tails if pack in planner.tail_packs else missing)

    found, _ = drive(planner, there, computed, limit)
    tail = deepest_tail(planner, there, computed, limit)
    if tail:
        assert found == tail
    else:
        assert found == computed or found % planner.boundary_tokens == 0


@examples(300)
@given(planner=plans_with_tails(), prompt=st.integers(1, 400))
def test_a_tail_holds_every_token_that_its_end_needs_in_no_more_blocks_than_it_has_slots(
    planner: HybridOffloadPlanner, prompt: int
) -> None:
    end = planner.tail_end(prompt)
    deepest = planner.reachable_prefix(prompt - 1)
    assert end == (deepest if deepest % planner.boundary_tokens else 0)
    begin = end - end % planner.boundary_tokens
    for pack in planner.tail_packs:
        units = pack.needed_units(0, end)
        for group in pack.groups:
            needed = {t // group.block_size_tokens for t in range(begin, end) if needs(group.policy, t, end)}
            if needed:
                assert pack.tokens_in(units.start + 1) == end
                blocks = pack.block_range(group, units.start)
                assert needed == set(blocks)
                assert len(blocks) <= pack.stored_blocks(group)


@pytest.mark.parametrize("prompt", [1, 16, 769, 1025])
def test_a_prompt_that_ends_at_a_boundary_has_no_tail(prompt: int) -> None:
    planner = HybridOffloadPlanner.build(
        [GroupGeometry(0, 128, FULL)], hash_block_size=16, max_model_len=8192, hybrid_chunk_size=256, tail_tokens=16
    )
    assert planner.tail_end(prompt) == 0
    assert planner.tail_end(900) == 896


@pytest.mark.parametrize(
    ("groups", "chunk", "reason"),
    [
        ([(16, FULL), (16, chunked(256))], 256, "group 1 has no objects"),
        ([(512, FULL), (16, window(64))], 256, "units other than"),
    ],
)
def test_without_tails_a_warning_says_why(groups: list[tuple[int, HitPolicy]], chunk: int, reason: str) -> None:
    planner = HybridOffloadPlanner.build(
        [GroupGeometry(index, block, policy) for index, (block, policy) in enumerate(groups)],
        hash_block_size=16,
        max_model_len=8192,
        hybrid_chunk_size=chunk,
        tail_tokens=16,
    )
    assert planner.tail_packs == ()
    assert any("prefix_match_unit" in warning and reason in warning for warning in planner.warnings)
