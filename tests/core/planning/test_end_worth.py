"""The worth of the ends of paths."""

from __future__ import annotations

import pytest

from offload_core.planning import end_worth
from offload_core.planning.end_worth import MIN_PARTED_PATHS, EndWorth
from offload_core.planning.placement import BoundaryHistory, PathPlacement
from offload_core.planning.planner import GroupGeometry, HybridOffloadPlanner
from tests.support.geometries import FULL, STATE

PLANNER = HybridOffloadPlanner.build(
    [GroupGeometry(0, 16, FULL), GroupGeometry(1, 16, STATE)], hash_block_size=16, max_model_len=4096,
    hybrid_chunk_size=16,
)  # fmt: skip


def continue_from_the_end(worth: EndWorth) -> None:
    """A path of ten chunks that goes on where another has ended, after eight."""
    worth.add(tokens=160, replay_tokens=144, shared=0, kept=128, seen=128)


def part_between(worth: EndWorth) -> None:
    """A path of ten chunks that parts from another one after eight, where no boundary is kept."""
    worth.add(tokens=160, replay_tokens=144, shared=0, kept=0, seen=128)


def test_ends_pay_until_enough_paths_have_parted_between() -> None:
    worth = EndWorth(PLANNER)
    for _ in range(MIN_PARTED_PATHS):
        assert worth.ends_pay
        part_between(worth)
    assert not worth.ends_pay


def test_paths_that_continue_make_ends_pay_again() -> None:
    worth = EndWorth(PLANNER)
    for _ in range(MIN_PARTED_PATHS):
        part_between(worth)
    for _ in range(MIN_PARTED_PATHS - 1):
        continue_from_the_end(worth)
    assert not worth.ends_pay
    continue_from_the_end(worth)
    assert worth.ends_pay, "as many tokens, and each path has one state at its end and one before"


def test_a_byte_of_each_kind_counts_alike() -> None:
    worth = EndWorth(PLANNER)
    for _ in range(2 * MIN_PARTED_PATHS):
        part_between(worth)
    continue_from_the_end(worth)
    assert not worth.ends_pay
    for _ in range(MIN_PARTED_PATHS):  # nine new states of which one is of the end
        worth.add(tokens=4000, replay_tokens=3984, shared=0, kept=0, seen=0)
    assert worth.ends_pay, "nearly all bytes are of boundaries between, so a byte of them serves little"


def test_a_boundary_that_several_paths_have_is_no_end() -> None:
    worth = EndWorth(PLANNER)
    for _ in range(MIN_PARTED_PATHS):
        part_between(worth)
    for _ in range(100):
        worth.add(tokens=160, replay_tokens=144, shared=128, kept=128, seen=128)
    assert not worth.ends_pay


def test_packs_count_with_the_bytes_of_their_objects() -> None:
    planner = HybridOffloadPlanner.build(
        [GroupGeometry(0, 16, FULL), GroupGeometry(1, 16, STATE), GroupGeometry(2, 32, STATE)],
        hash_block_size=16, max_model_len=4096, hybrid_chunk_size=16,
    )  # fmt: skip
    small, large = (pack.name for pack in planner.packs if pack.policy == STATE)
    verdicts = []
    for sizes in ({small: 1, large: 1000}, {small: 1000, large: 1}):
        worth = EndWorth(planner, sizes)
        for _ in range(MIN_PARTED_PATHS):
            # The end needs one of eight small states, and one of four large ones.
            worth.add(tokens=128, replay_tokens=128, shared=0, kept=0, seen=0)
            worth.add(tokens=96, replay_tokens=96, shared=0, kept=16, seen=96)
        verdicts.append(worth.ends_pay)
    assert verdicts == [False, True]


def test_old_paths_count_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_worth, "WINDOW_PATHS", 16)
    worth = EndWorth(PLANNER)
    for _ in range(1000):
        part_between(worth)
    for _ in range(32):
        continue_from_the_end(worth)
    assert worth.ends_pay


def test_without_paths_ends_pay() -> None:
    worth = EndWorth(PLANNER)
    for _ in range(MIN_PARTED_PATHS):
        part_between(worth)
    worth.clear()
    assert worth.ends_pay


def test_the_history_tells_a_path_where_it_resumes() -> None:
    history, worth = BoundaryHistory(), EndWorth(PLANNER)
    for number in range(2 * MIN_PARTED_PATHS):  # pairs of paths that part after two chunks, where neither ends
        for tail in (1, 2):
            path = PathPlacement(PLANNER, 65)
            names = [(number,), (number, 0), (number, 0, tail), (number, 0, tail, 0)]
            path.begin(names, history, worth)
            path.touches(65, names, history)
    assert path.ends_are_spare
    for number in range(100):  # each pair again: one path continues the other
        for chunks in (4, 8):
            path = PathPlacement(PLANNER, 16 * chunks + 1)
            names = [(-1, number, *range(count)) for count in range(chunks)]
            path.begin(names, history, worth)
            path.touches(16 * chunks + 1, names, history)
    assert not path.ends_are_spare
