"""A request's waits for storage: added up by what they are for."""

from __future__ import annotations

import pytest

from offload_core.lookup.wait_clock import StorageWait


class Clock:
    """Seconds that the test lets pass."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_waits_add_up_by_what_they_are_for(clock: Clock) -> None:
    wait = StorageWait(clock)
    for what, seconds in (("lookup", 2.0), ("load", 3.0), ("lookup", 0.5)):
        wait.begin("lookup" if what == "lookup" else "load")
        clock.now += seconds
    assert (wait.seconds("lookup"), wait.seconds("load")) == (2.5, 3.0), "the one that goes on counts as well"
    wait.end()
    clock.now += 10
    assert (wait.seconds("lookup"), wait.seconds("load")) == (2.5, 3.0), "waiting for the engine is none of them"


def test_a_wait_that_goes_on_is_not_begun_anew(clock: Clock) -> None:
    wait = StorageWait(clock)
    for _ in range(3):
        wait.begin("load")
        clock.now += 1
    wait.end()
    wait.end()
    assert wait.seconds("load") == 3.0


def test_what_was_no_wait_for_storage_is_forgotten(clock: Clock) -> None:
    wait = StorageWait(clock)
    wait.begin("load")
    clock.now += 1
    wait.begin("lookup")
    clock.now += 1
    wait.forget("lookup")
    clock.now += 1
    assert (wait.seconds("lookup"), wait.seconds("load")) == (0.0, 1.0)
