"""Placement, against definitions that walk boundaries one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offload_core.planning.placement import BoundaryHistory, PathPlacement, Touch
from offload_core.planning.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner, Pack, PrefixDepth
from tests.support.geometries import FULL, STATE, Geometry, geometries, window

CHUNK = 16
WINDOW = "window-u16-w17"


def plan(*policies: HitPolicy) -> HybridOffloadPlanner:
    groups = tuple(GroupGeometry(index, CHUNK, policy) for index, policy in enumerate(policies))
    return Geometry(groups, CHUNK, CHUNK).plan()


HYBRID = plan(FULL, window(CHUNK + 1))  # each boundary needs one unit of the window
FULL_PACK, WINDOW_PACK = HYBRID.packs


def names(*tokens: int) -> list[tuple[int, ...]]:
    """Name the boundaries of a path of chunks: each chunk is a number, and a name is all chunks up to the boundary."""
    return [tokens[: index + 1] for index in range(len(tokens))]


def windows(touches: list[Touch]) -> dict[int, bool]:
    """The window's touched units, and whether each is spare."""
    return {touch.unit: touch.spare for touch in touches if touch.pack is WINDOW_PACK}


@given(geometries(), st.data())
def test_a_unit_is_kept_if_a_kept_boundary_needs_it(geometry: Geometry, data: st.DataObject) -> None:
    planner = geometry.plan()
    step = planner.boundary_tokens
    prompt = data.draw(st.integers(1, 12 * step))
    junctions = data.draw(st.lists(st.integers(0, prompt), max_size=3))
    path = PathPlacement(planner, prompt)
    for junction in junctions:
        path.add_junction(junction)
    replay = (prompt - 1) // step * step
    kept = {replay, *(junction // step * step for junction in junctions)}
    kept.update(range(replay, 20 * step, step))  # every boundary of the generated text is the end when it is reached
    for pack in planner.packs:
        for unit in range(pack.units_in(14 * step)):
            if planner.ever_needed(pack, unit):
                needed = any(unit in pack.needed_units(0, boundary) for boundary in kept)
                assert path.keeps(pack, unit) == (pack.policy.kind == "full" or needed)


@given(geometries(), st.data())
def test_the_deepest_objects_are_touched_first_and_each_once(geometry: Geometry, data: st.DataObject) -> None:
    planner = geometry.plan()
    tokens = data.draw(st.integers(0, 12 * planner.boundary_tokens))
    path = PathPlacement(planner, data.draw(st.integers(1, 12 * planner.boundary_tokens)))
    path.add_junction(data.draw(st.integers(0, tokens)))
    touches = path.touches(tokens, names(*range(planner.chunk_count(tokens))), BoundaryHistory())
    ends = [pack.tokens_in(unit + 1) for pack, unit, _ in touches]
    assert ends == sorted(ends, reverse=True)
    assert len({(pack.name, unit) for pack, unit, _ in touches}) == len(touches)
    end = planner.storable_prefix(tokens)
    for pack in planner.packs:
        if pack.policy.kind == "full":
            assert [unit for touched, unit, _ in touches if touched is pack] == [*reversed(range(pack.units_in(end)))]
        if end >= path.replay_tokens:
            touched = {(unit, spare) for other, unit, spare in touches if other is pack}
            assert {(unit, False) for unit in pack.needed_units(0, end)} <= touched


def test_a_prompt_keeps_its_replay_boundary_and_its_end() -> None:
    path = PathPlacement(HYBRID, 40)
    assert [unit for unit in range(5) if path.keeps(WINDOW_PACK, unit)] == [1, 2, 3, 4]
    assert windows(path.touches(70, names(0, 1, 2, 3), BoundaryHistory())) == {1: False, 2: True, 3: False}


def test_a_prompt_of_whole_chunks_can_resume_one_chunk_before_its_end() -> None:
    path = PathPlacement(HYBRID, 48)
    assert path.replay_tokens == 32
    assert windows(path.touches(48, names(0, 1, 2), BoundaryHistory())) == {1: False, 2: False}


def test_the_next_turn_makes_the_boundaries_before_it_spare() -> None:
    history = BoundaryHistory()
    PathPlacement(HYBRID, 40).touches(40, names(0, 1), history)
    touches = PathPlacement(HYBRID, 80).touches(80, names(0, 1, 2, 3, 4), history)
    assert windows(touches) == {1: True, 3: False, 4: False}


def test_a_boundary_that_another_request_came_back_to_stays() -> None:
    history = BoundaryHistory()
    for _ in range(2):
        PathPlacement(HYBRID, 40).touches(40, names(0, 1), history)
    touches = PathPlacement(HYBRID, 80).touches(80, names(0, 1, 2, 3, 4), history)
    assert windows(touches) == {1: False, 3: False, 4: False}


def test_a_junction_stays_whatever_comes_behind_it() -> None:
    history = BoundaryHistory()
    second = PathPlacement(HYBRID, 60)
    second.add_junction(20)
    assert second.keeps(WINDOW_PACK, 0)
    assert windows(second.touches(60, names(0, 8, 9), history)) == {0: False, 2: False}
    third = PathPlacement(HYBRID, 60).touches(60, names(0, 5, 6), history)
    assert windows(third) == {0: False, 2: False}


def test_a_boundary_that_nobody_knows_is_left_as_it_is() -> None:
    touches = PathPlacement(HYBRID, 80).touches(80, names(0, 1, 2, 3, 4), BoundaryHistory())
    assert windows(touches) == {3: False, 4: False}


def test_a_request_that_ends_within_its_prompt_supersedes_nothing() -> None:
    history = BoundaryHistory()
    PathPlacement(HYBRID, 40).touches(40, names(0, 1), history)
    assert windows(PathPlacement(HYBRID, 80).touches(60, names(0, 1, 2), history)) == {}
    assert windows(PathPlacement(HYBRID, 80).touches(80, names(0, 1, 2, 3, 4), history))[1] is True


def test_a_prompt_shorter_than_a_chunk_keeps_its_end() -> None:
    path = PathPlacement(HYBRID, 5)
    assert windows(path.touches(40, names(0, 1), BoundaryHistory())) == {0: True, 1: False}


def test_a_state_is_kept_at_kept_boundaries_only() -> None:
    planner = plan(FULL, STATE)
    state: Pack = planner.packs[1]
    path = PathPlacement(planner, 70)
    path.add_junction(32)
    assert [unit for unit in range(6) if path.keeps(state, unit)] == [1, 3, 4, 5]


def test_paths_of_windows_only_are_compared_by_the_boundaries_seen() -> None:
    history = BoundaryHistory()
    assert history.see(names(0, 1, 2)) == 0
    assert history.see(names(0, 1, 5, 6)) == 2
    assert history.see(names(7, 1, 2)) == 0


def found_at(history: BoundaryHistory, usable: int, attention: int, *tokens: int) -> set[int]:
    """The window's units that a prompt of these chunks and one token keeps after a lookup with this result."""
    path = PathPlacement(HYBRID, CHUNK * len(tokens) + 1)
    path.find_junction(PrefixDepth(usable, attention), names(*tokens), history.see(names(*tokens)), history)
    return {unit for unit in range(len(tokens)) if path.keeps(WINDOW_PACK, unit)}


def test_attention_without_windows_shows_a_junction() -> None:
    assert found_at(BoundaryHistory(), 0, 32, 0, 1, 2, 3) == {1, 3}
    assert found_at(BoundaryHistory(), 32, 32, 0, 1, 2, 3) == {3}


def test_the_history_shows_a_junction_whose_attention_was_evicted() -> None:
    history = BoundaryHistory()
    assert found_at(history, 0, 0, 0, 1, 2, 3) == {3}
    assert found_at(history, 0, 0, 0, 1, 8, 9) == {1, 3}
    assert found_at(history, 0, 16, 0, 1, 8, 7) == {2, 3}


def test_a_spare_boundary_that_serves_a_second_path_is_a_junction() -> None:
    history = BoundaryHistory()
    assert found_at(history, 0, 0, 0, 1, 2, 3) == {3}
    assert found_at(history, 32, 32, 0, 1, 5, 6) == {1, 3}
    assert found_at(history, 0, 0, 0, 7, 8, 9) == {0, 3}
    assert found_at(history, 48, 48, 0, 7, 8, 6) == {2, 3}
    assert found_at(history, 64, 64, 4, 4, 4, 4, 4) == {4}, "an earlier engine has stored it"


def test_spare_ends_are_kept_once_a_second_path_has_them() -> None:
    history = BoundaryHistory()

    def touched() -> dict[int, bool]:
        path = PathPlacement(HYBRID, 49)
        path.ends_are_spare = True
        assert not any(path.keeps(WINDOW_PACK, unit) for unit in range(5))
        return windows(path.touches(64, names(0, 1, 2, 3), history))

    assert touched() == {2: True, 3: True}
    assert touched() == {2: False, 3: False}


def test_a_junction_is_kept_although_ends_are_spare() -> None:
    path = PathPlacement(HYBRID, 65)
    path.ends_are_spare = True
    path.add_junction(32)
    assert [path.keeps(WINDOW_PACK, unit) for unit in range(4)] == [False, True, False, False]
    assert path.keeps(FULL_PACK, 3)
    assert windows(path.touches(65, names(0, 1, 2, 3), BoundaryHistory())) == {1: False, 3: True}


def test_a_path_that_only_continues_another_has_no_junction() -> None:
    history = BoundaryHistory()
    first = PathPlacement(HYBRID, 33)
    first.find_junction(PrefixDepth(0, 0), names(0, 1), history.see(names(0, 1)), history)
    first.touches(33, names(0, 1), history)
    assert found_at(history, 0, 32, 0, 1, 2, 3) == {3}
    PathPlacement(HYBRID, 65).touches(65, names(0, 1, 2, 3), history)
    assert found_at(history, 0, 32, 0, 1, 8, 9) == {1, 3}, "the end was superseded, so another path parts there"


def test_without_full_attention_only_the_history_shows_a_junction() -> None:
    planner = plan(window(CHUNK + 1))
    history = BoundaryHistory()
    for tokens, kept in (((0, 1, 2), {2}), ((0, 1, 8), {1, 2})):
        path = PathPlacement(planner, 49)
        path.find_junction(PrefixDepth(0, 48), names(*tokens), history.see(names(*tokens)), history)
        assert {unit for unit in range(3) if path.keeps(planner.packs[0], unit)} == kept


def test_the_replay_boundary_is_as_deep_as_a_junction_can_be() -> None:
    history = BoundaryHistory()
    history.see(names(0, 1, 2))
    path = PathPlacement(HYBRID, 48)
    path.find_junction(PrefixDepth(0, 0), names(0, 1, 2), history.see(names(0, 1, 2)), history)
    assert windows(path.touches(48, names(0, 1, 2), history)) == {1: False, 2: False}
    assert history.is_shared((0, 1)) is True
    assert history.is_shared((0, 1, 2)) is False


@given(st.integers(1, 5), st.lists(st.integers(0, 9), max_size=30))
def test_a_history_is_bounded_and_forgets_what_was_used_longest_ago(limit: int, kept: list[int]) -> None:
    history = BoundaryHistory(limit)
    for number in kept:
        history.keep(number, junction=True)
    latest = list(dict.fromkeys(reversed(kept)))[:limit]
    assert [number for number in range(10) if history.is_shared(number)] == sorted(latest)
