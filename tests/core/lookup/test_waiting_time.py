"""A request's waits for storage add up by their reason."""

from __future__ import annotations

import pytest

from offload_core.lookup.waiting_time import WaitingTime


class Clock:
    """Seconds that the test lets pass."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_waits_add_up_by_reason(clock: Clock) -> None:
    wait = WaitingTime(clock)
    for reason, seconds in (("lookup", 2.0), ("load", 3.0), ("lookup", 0.5)):
        wait.begin("lookup" if reason == "lookup" else "load")
        clock.now += seconds
    assert (wait.seconds("lookup"), wait.seconds("load")) == (2.5, 3.0), "the one that goes on counts as well"
    wait.end()
    clock.now += 10
    assert (wait.seconds("lookup"), wait.seconds("load")) == (2.5, 3.0), "waiting for the engine is none of them"


def test_a_wait_that_goes_on_is_not_begun_anew(clock: Clock) -> None:
    wait = WaitingTime(clock)
    for _ in range(3):
        wait.begin("load")
        clock.now += 1
    wait.end()
    wait.end()
    assert wait.seconds("load") == 3.0


def test_reset_forgets_the_waits_for_one_reason(clock: Clock) -> None:
    wait = WaitingTime(clock)
    wait.begin("load")
    clock.now += 1
    wait.begin("lookup")
    clock.now += 1
    wait.reset("lookup")
    clock.now += 1
    assert (wait.seconds("lookup"), wait.seconds("load")) == (0.0, 1.0)
