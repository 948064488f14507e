"""The search for the deepest usable prefix: its result, against an oracle that walks tokens, and its questions."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.planning.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner, Pack, UnitRange
from tests.support.geometries import FULL, STATE, Geometry, chunked, drive, geometries, needs, window
from tests.support.random_examples import examples

Present = dict[str, list[bool]]


def there(present: Present, pack: Pack, unit: int) -> bool:
    return unit < len(present[pack.name]) and present[pack.name][unit]


def deepest_usable(geometry: Geometry, present: Present, computed: int, limit: int, attention: int = 0) -> int:
    """Walk back token by token to a boundary of which every needed token is in an object that is there.

    Full attention is needed only behind the ``attention`` tokens that the engine holds, and at the boundary itself.
    """
    planner = geometry.plan()
    units = {group: geometry.unit_tokens(group, planner.hybrid_chunk_size) for group in geometry.groups}
    pack_of = {group: pack for pack in planner.packs for group in pack.groups}
    for boundary in range(limit, computed, -1):
        if all(boundary % unit == 0 for unit in units.values()) and all(
            group in pack_of and there(present, pack_of[group], token // units[group])
            for group in geometry.groups
            for token in range(computed, boundary)
            if needs(group.policy, token, boundary)
            if group.policy != FULL or token >= min(attention, boundary - 1)
        ):
            return boundary
    return computed


@st.composite
def presences(draw: st.DrawFn, planner: HybridOffloadPlanner, limit: int) -> Present:
    """Draw the stored units of each pack: all but some holes, an early end, only a few, every other one, none."""
    present: Present = {}
    for pack in planner.packs:
        units = limit // pack.unit_tokens + 1
        few = draw(st.sets(st.integers(0, units), max_size=6))
        end = draw(st.sampled_from((units, units, units // 2)))
        present[pack.name] = draw(
            st.sampled_from(
                (
                    [unit not in few for unit in range(end)],
                    [unit not in few for unit in range(end)],
                    [unit in few for unit in range(end)],
                    [unit % 2 == 0 for unit in range(end)],
                    [],
                )
            )
        )
    return present


@st.composite
def searches(draw: st.DrawFn) -> tuple[Geometry, Present, int, int]:
    geometry = draw(geometries())
    limit = draw(st.integers(0, 240))
    computed = draw(st.integers(0, limit) | st.just(0))
    return geometry, draw(presences(geometry.plan(), limit)), computed, limit


@examples(600)
@given(drawn=searches())
def test_the_usable_prefix_is_neither_deeper_nor_shallower_than_the_definition(
    drawn: tuple[Geometry, Present, int, int],
) -> None:
    geometry, present, computed, limit = drawn
    planner = geometry.plan()
    found, _ = drive(planner, lambda pack, unit: there(present, pack, unit), computed, limit)
    assert found == deepest_usable(geometry, present, computed, limit)


@examples(600)
@given(drawn=searches(), data=st.data())
def test_with_deeper_local_attention_only_the_last_unit_of_it_is_needed(
    drawn: tuple[Geometry, Present, int, int], data: st.DataObject
) -> None:
    geometry, present, computed, limit = drawn
    planner = geometry.plan()
    attention = data.draw(st.integers(computed, limit))
    found, questions = drive(planner, lambda pack, unit: there(present, pack, unit), computed, limit, attention)
    assert found == deepest_usable(geometry, present, computed, limit, attention)
    asked = Counter((pack.name, unit) for question in questions for pack, units in question for unit in units)
    assert all(count == 1 for count in asked.values())


@examples(200)
@given(drawn=searches())
def test_no_unit_is_asked_for_twice_and_none_that_no_boundary_in_reach_could_need(
    drawn: tuple[Geometry, Present, int, int],
) -> None:
    geometry, present, computed, limit = drawn
    planner = geometry.plan()
    _, questions = drive(planner, lambda pack, unit: there(present, pack, unit), computed, limit)
    asked = Counter((pack.name, unit) for question in questions for pack, units in question for unit in units)
    assert all(count == 1 for count in asked.values())
    assert all(units for question in questions for _, units in question)
    for pack in planner.packs:
        for unit in (unit for name, unit in asked if name == pack.name):
            assert computed // pack.unit_tokens <= unit < planner.storable_prefix(limit) // pack.unit_tokens
            if pack.policy.kind == "state":
                assert pack.tokens_in(unit + 1) % planner.boundary_tokens == 0


@given(drawn=searches())
def test_what_is_known_beforehand_gives_the_same_prefix(drawn: tuple[Geometry, Present, int, int]) -> None:
    geometry, present, computed, limit = drawn
    planner = geometry.plan()
    found, _ = drive(planner, lambda pack, unit: there(present, pack, unit), computed, limit)
    known = {pack.name: present[pack.name][computed // pack.unit_tokens :] for pack in planner.packs}
    assert planner.usable_prefix(known, computed, limit) == found
    assert planner.usable_prefix({}, computed, limit) == drive(planner, lambda *_: False, computed, limit)[0]


@given(geometry=geometries(), data=st.data())
def test_with_everything_stored_the_last_boundary_within_the_limit_is_usable(
    geometry: Geometry, data: st.DataObject
) -> None:
    planner = geometry.plan()
    limit = data.draw(st.integers(0, 1000))
    computed = data.draw(st.integers(0, limit))
    found, _ = drive(planner, lambda *_: True, computed, limit)
    assert found == max(computed, limit - limit % planner.boundary_tokens)


def plan(*policies: HitPolicy, block: int = 16, chunk: int = 16) -> HybridOffloadPlanner:
    groups = [GroupGeometry(index, block, policy) for index, policy in enumerate(policies)]
    return HybridOffloadPlanner.build(groups, hash_block_size=block, max_model_len=1 << 20, hybrid_chunk_size=chunk)


def asked_units(questions: list[tuple[UnitRange, ...]]) -> list[dict[str, range]]:
    return [{pack.policy.kind: units for pack, units in question} for question in questions]


@pytest.mark.parametrize(("computed", "limit"), [(0, 15), (0, 0), (16, 31), (20, 31), (32, 16)])
def test_nothing_is_asked_where_no_boundary_is_in_reach(computed: int, limit: int) -> None:
    assert drive(plan(FULL, window(40)), lambda *_: True, computed, limit) == (computed, [])


@examples(200)
@given(geometry=geometries(), limit=st.integers(0, 5000))
def test_a_complete_miss_asks_one_batch_of_each_full_pack_and_nothing_of_the_others(
    geometry: Geometry, limit: int
) -> None:
    planner = geometry.plan()
    full = {pack.name for pack in planner.packs if pack.policy.kind == "full"}
    _, questions = drive(planner, lambda *_: False, 0, limit)
    if full and limit >= planner.boundary_tokens:
        (question,) = questions
        assert {pack.name for pack, _ in question} == full
        assert all(len(units) <= 16 for _, units in question)


def test_batches_of_full_packs_grow_upwards_and_stop_at_the_first_missing_unit() -> None:
    planner = plan(FULL)
    found, questions = drive(planner, lambda _, unit: unit != 5000, 0, 8192 * 16)
    assert found == 5000 * 16
    assert asked_units(questions) == [
        {"full": range(16)},
        {"full": range(16, 272)},
        {"full": range(272, 4368)},
        {"full": range(4368, 8192)},
    ]


def test_batches_of_other_packs_grow_downwards_from_where_the_full_packs_end() -> None:
    planner = plan(FULL, STATE, window(40))
    found, questions = drive(planner, lambda pack, unit: pack.policy.kind == "full" or unit < 100, 0, 1000 * 16)
    assert found == 100 * 16
    assert asked_units(questions)[-3:] == [
        {"state": range(984, 1000), "window": range(984, 1000)},
        {"state": range(728, 984), "window": range(728, 984)},
        {"state": range(728), "window": range(728)},
    ]


def test_a_hit_asks_other_packs_once_for_what_it_needs_and_some_units_below() -> None:
    planner = plan(FULL, window(16 * 100 + 1), chunked(16 * 64))
    _, questions = drive(planner, lambda *_: True, 0, 1000 * 16)
    assert asked_units(questions)[-1] == {"window": range(900, 1000), "chunked": range(960, 1000)}


def test_units_below_a_missing_one_that_no_candidate_needs_any_more_are_not_asked_for() -> None:
    """The candidate that another pack leaves lies far below: the units in between are skipped."""
    groups = [GroupGeometry(0, 64, STATE), GroupGeometry(1, 16, window(40))]
    planner = HybridOffloadPlanner.build(groups, hash_block_size=16, max_model_len=4096, hybrid_chunk_size=16)
    found, questions = drive(planner, lambda pack, unit: pack.policy.kind == "window" or unit == 5, 0, 1024)
    assert found == 384
    assert asked_units(questions) == [{"state": range(16), "window": range(48, 64)}, {"window": range(24)}]


def test_of_recurrent_packs_only_states_at_boundaries_are_asked_for() -> None:
    groups = [GroupGeometry(0, 16, STATE), GroupGeometry(1, 64, FULL)]
    planner = HybridOffloadPlanner.build(groups, hash_block_size=16, max_model_len=4096, hybrid_chunk_size=16)
    found, questions = drive(planner, lambda pack, unit: pack.policy.kind == "full" or unit == 7, 0, 320)
    assert found == 128
    assert asked_units(questions) == [{"full": range(5)}, {"state": range(3, 20, 4)}]


@pytest.mark.parametrize("policy", [FULL, window(40)], ids=str)
@pytest.mark.parametrize("answers", [[], [[True] * 15], [[True] * 17], [[True] * 16] * 2], ids=str)
def test_answers_of_another_shape_than_the_question_are_refused(policy: HitPolicy, answers: list[list[bool]]) -> None:
    search = plan(policy).search(0, 1000)
    assert len(next(search)[0].units) == 16
    with pytest.raises(ValueError, match="asked about"):
        search.send(answers)


@examples(300)
@given(drawn=geometries())
def test_a_unit_is_worth_storing_when_some_boundary_needs_it(drawn: Geometry) -> None:
    planner = drawn.plan()
    tokens = planner.boundary_tokens * 4
    for pack in planner.packs:
        needed = {
            token // pack.unit_tokens
            for boundary in range(planner.boundary_tokens, tokens + 1, planner.boundary_tokens)
            for token in range(boundary)
            if needs(pack.policy, token, boundary)
        }
        worth = {unit for unit in range(tokens // pack.unit_tokens) if planner.ever_needed(pack, unit)}
        assert worth == needed
