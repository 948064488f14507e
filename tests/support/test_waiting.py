"""The definition of a wait for storage, as the connector of the fault tests measures it."""

from __future__ import annotations

import pytest

from tests.support.engine.waiting import StorageWait, StorageWaits


class Clock:
    """Whole seconds, one more at each step of the engine."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def waits(clock: Clock) -> StorageWaits:
    return StorageWaits(clock)


def _step(waits: StorageWaits, clock: Clock, seconds: float = 1.0) -> None:
    """Let the step begin whose questions are asked, and pass."""
    waits.step()
    clock.now += seconds


def test_a_lookup_and_a_load(waits: StorageWaits, clock: Clock) -> None:
    for _ in range(3):
        waits.begin("a", "lookups")
        _step(waits, clock)
    waits.end("a")
    waits.begin("a", "loads")
    _step(waits, clock, 5)
    waits.end("a")
    assert waits.take() == {"a": StorageWait(3, 5, 0, longest_step=5, asked=3, loads_begun=1)}
    assert waits.take() == {}


def test_steps_in_which_the_engine_does_not_ask_are_not_waited_for_storage(waits: StorageWaits, clock: Clock) -> None:
    waits.begin("a", "lookups")
    _step(waits, clock)
    _step(waits, clock)  # no turn for it
    _step(waits, clock)
    waits.end("a")
    assert waits.take()["a"].lookups == 1


def test_lookups_before_an_answer_that_the_engine_had_no_blocks_for_do_not_count(
    waits: StorageWaits, clock: Clock
) -> None:
    waits.begin("a", "lookups")
    _step(waits, clock, 5)
    waits.answer("a")
    _step(waits, clock)  # no blocks
    waits.begin("a", "lookups")
    _step(waits, clock, 2)
    waits.answer("a")
    waits.run("a")
    waits.begin("a", "lookups")  # preempted since then
    _step(waits, clock)
    waits.answer("a")
    assert waits.take()["a"].lookups == 2 + 1


def test_a_load_is_waited_for_whatever_the_engine_asks(waits: StorageWaits, clock: Clock) -> None:
    waits.begin("a", "loads")
    _step(waits, clock)
    _step(waits, clock)
    assert waits.take() == {}, "it goes on"
    waits.end("a")
    waits.begin("a", "kept_back")
    _step(waits, clock)
    waits.end("a")
    waits.end("unknown")
    assert waits.take() == {"a": StorageWait(0, 2, 1, longest_step=1, loads_begun=1)}
