"""The search for the end of a prefix: its result, its rounds and its questions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from offload_core.planning.depth_search import depth_search, questions


def drive(present: Sequence[bool], first: int, rounds: int, *, needs_all: bool = True) -> tuple[int, list[list[int]]]:
    """Return the answer of a search in the units from ``first`` on, and the units of each round."""
    search = depth_search(first, len(present), rounds, needs_all=needs_all)
    asked: list[list[int]] = []
    try:
        units = next(search)
        while True:
            asked.append(units)
            units = search.send([present[unit] for unit in units])
    except StopIteration as end:
        return int(end.value), asked


@given(units=st.integers(0, 3000), rounds=st.integers(1, 4), data=st.data())
@example(units=512, rounds=2, data=None)
def test_it_finds_the_end_of_a_prefix_in_its_rounds(units: int, rounds: int, data: st.DataObject | None) -> None:
    first, depth = 0, units // 2
    if data is not None:
        first = data.draw(st.integers(0, units), label="first")
        depth = data.draw(st.integers(first, units), label="depth")
    found, asked = drive([unit < depth for unit in range(units)], first, rounds)
    assert found == depth
    assert len(asked) <= rounds
    assert sum(map(len, asked)) <= questions(units - first, rounds)
    assert all(sorted(set(part)) == part for part in asked)
    assert len({unit for part in asked for unit in part}) == sum(map(len, asked)), "no unit is asked about twice"


@given(present=st.lists(st.booleans(), max_size=200), rounds=st.integers(1, 3), needs_all=st.booleans())
def test_with_holes_it_still_ends_behind_a_unit_that_is_there_and_before_one_that_is_not(
    present: list[bool], rounds: int, needs_all: bool
) -> None:
    found, asked = drive(present, 0, rounds, needs_all=needs_all)
    assert found == 0 or present[found - 1]
    assert found == len(present) or not present[found]
    assert len(asked) <= rounds
    missing = [unit for part in asked for unit in part if not present[unit]]
    assert not needs_all or found <= min(missing, default=found), "a unit that is known to be missing is not used"


def test_windows_without_their_head_are_found() -> None:
    present = [100 <= unit < 300 for unit in range(512)]
    assert drive(present, 0, 2, needs_all=False)[0] == 300
    assert drive(present, 0, 2)[0] == 0


def test_a_prefix_of_which_nothing_is_there_takes_one_round() -> None:
    _, asked = drive([False] * 512, 0, 2)
    assert len(asked) == 1


@pytest.mark.parametrize(("units", "rounds", "most"), [(512, 2, 45), (4000, 3, 46), (1, 2, 1), (0, 2, 0)])
def test_the_number_of_questions(units: int, rounds: int, most: int) -> None:
    assert questions(units, rounds) <= most
