"""Pauses between replacements: none for the first, growing ones for a process that keeps ending."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offload_core.runtime.restart_pause import RestartPause


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_pauses_of_a_process_that_ends_at_once() -> None:
    clock = Clock()
    pause = RestartPause(clock=clock)
    pauses = []
    for _ in range(10):
        pause.started()
        clock.now += 1
        pauses.append(pause.ended())
    assert pauses == [0, 0.5, 1, 2, 4, 8, 16, 32, 60, 60]


def test_a_failed_start_counts_like_an_early_end() -> None:
    pause = RestartPause(clock=Clock())
    assert [pause.ended() for _ in range(4)] == [0, 0.5, 1, 2]


def test_a_failed_start_after_a_healthy_process_is_not_taken_for_healthy() -> None:
    clock = Clock()
    pause = RestartPause(clock=clock)
    pause.started()
    clock.now += 60
    pauses = []
    for _ in range(3):
        pauses.append(pause.ended())
        clock.now += 100
    assert pauses == [0, 0.5, 1]


def test_it_grows_forever_without_an_overflow() -> None:
    pause = RestartPause(clock=Clock())
    assert {pause.ended() for _ in range(5000)} == {0, 0.5, 1, 2, 4, 8, 16, 32, 60}


@given(
    st.lists(st.floats(0, 120), max_size=30),
    st.sampled_from([0.1, 0.5, 3.0]),
    st.sampled_from([3.0, 60.0]),
    st.sampled_from([10.0, 60.0]),
)
def test_a_pause_depends_on_the_short_lives_since_the_last_long_one(
    lives: list[float], first: float, longest: float, healthy: float
) -> None:
    clock = Clock()
    pause = RestartPause(first, longest, healthy, clock)
    short = 0
    for life in lives:
        clock.now = 0  # so that the sum of the two is exact
        pause.started()
        clock.now += life
        short = 0 if life >= healthy else short
        assert pause.ended() == (0 if short == 0 else min(first * 2 ** (short - 1), longest))
        short += 1
