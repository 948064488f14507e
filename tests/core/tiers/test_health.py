"""A tier's health: refusals, counters, events, and few log lines."""

from __future__ import annotations

import logging
import threading
from collections import Counter

import pytest

from offload_core.api import events
from offload_core.api.errors import BackendError
from offload_core.config.limits import Limits
from offload_core.plugins.observers import EventDelivery
from offload_core.runtime.metrics import Counters
from offload_core.tiers.health import MAX_QUIET_SECONDS, QUIET_SECONDS, TierHealth
from tests.support.memory_backend import key

GONE = OSError("the medium is gone")
LIMITS = Limits(breaker_failures=5, breaker_pause_seconds=1.0, breaker_max_pause_seconds=60.0)


class Recorded(EventDelivery):
    """Keeps the events."""

    def __init__(self) -> None:
        super().__init__((), Counters())
        self.events: list[events.Event] = []

    def emit(self, event: events.Event) -> None:
        self.events.append(event)


class Rig:
    """A health whose time stands still unless the test moves it."""

    def __init__(self, caplog: pytest.LogCaptureFixture, limits: Limits = LIMITS) -> None:
        self.now = 1000.0
        self.counters = Counters()
        self.observers = Recorded()
        self.health = TierHealth("nvme", limits, self.counters, self.observers, lambda: self.now)
        self._caplog = caplog
        self._totals: Counter[str] = Counter()
        caplog.set_level(logging.DEBUG, "offload_core")

    def call(self, operation: events.Operation, error: Exception | None = None) -> bool:
        """Make a call that succeeds or raises; returns whether it was let through."""
        call = self.health.begin(operation)
        if call is None:
            return False
        if error is None:
            self.health.succeeded(call)
        else:
            self.health.failed(call, [key(1), key(2)], error)
        self.health.ended(call)
        return True

    def probe(self, error: Exception | None = None) -> None:
        """Wait for the next probe and let it come back."""
        seconds = self.health.probe_in_seconds
        assert seconds is not None
        self.now += seconds
        assert self.health.begin_probe()
        self.health.probe_ended(error)

    def lines(self) -> list[str]:
        """Return the log lines since the last call, debug lines excepted."""
        lines = [record.getMessage() for record in self._caplog.records if record.levelno > logging.DEBUG]
        assert all(record.levelno <= logging.WARNING for record in self._caplog.records)
        self._caplog.clear()
        return lines

    def total(self, counter: str) -> int:
        for (name, _), count in self.counters.take().items():
            self._totals[name] += int(count)
        return self._totals[counter]


@pytest.fixture
def rig(caplog: pytest.LogCaptureFixture) -> Rig:
    return Rig(caplog)


def test_a_medium_that_dies_and_comes_back_costs_two_lines_each(rig: Rig) -> None:
    for _ in range(3000):
        rig.call("load", GONE)
    failing, unused = rig.lines()
    assert failing == (
        f"tier 'nvme': load failed (first of 2 objects: {key(1)}): OSError: the medium is gone. The engine goes on "
        "without it; check its medium. Further failures are counted and not logged until it works again."
    )
    assert unused == (
        f"tier 'nvme' is not used for now, after 5 failures in a row; the last: load failed (first of 2 objects: "
        f"{key(1)}): OSError: the medium is gone. Check its medium; it is tried again after 1 s, then at intervals of "
        "up to 60 s, and used when it answers."
    )
    for _ in range(10):
        rig.probe(GONE)
    assert rig.lines() == []
    rig.probe()
    assert rig.call("load")
    assert rig.lines() == ["tier 'nvme': load works again", "tier 'nvme' is used again, after 363 s"]
    for _ in range(3000):
        rig.call("load")
    assert rig.lines() == []


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("plugin"), BackendError("plugin")], ids=["defect", "broken clause"]
)
def test_a_defect_of_a_backend_has_another_cure(rig: Rig, error: Exception) -> None:
    rig.call("store", error)
    (line,) = rig.lines()
    assert "store failed" in line
    assert "Error: plugin. The engine goes on without it; if its medium works, tell the backend's" in line


@pytest.mark.parametrize("operation", ["lookup", "load"])
def test_thousands_of_timeouts_are_two_lines_that_name_the_deadline(rig: Rig, operation: events.Operation) -> None:
    for number in range(3000):
        rig.health.timed_out(operation, key(number))
    failing, unused = rig.lines()
    seconds = {"lookup": "1", "load": "30"}[operation]
    assert failing.startswith(
        f"tier 'nvme': {operation} failed (first object: {key(0)}): no answer within {operation}_timeout_seconds = "
        f"{seconds}. The engine goes on without it; check that its medium answers, or raise "
        f"{operation}_timeout_seconds "
    )
    assert f"{operation} failed (first object: {key(4)})" in unused


def test_a_medium_that_fails_every_second_call_is_one_line(rig: Rig) -> None:
    for _ in range(5000):
        rig.now += 0.01
        rig.call("load", GONE)
        rig.call("load")
        rig.call("store", GONE)
        rig.call("store")
    assert [line.partition(" failed")[0] for line in rig.lines()] == ["tier 'nvme': load", "tier 'nvme': store"]
    rig.now += QUIET_SECONDS - 0.01
    rig.call("load")
    assert rig.lines() == [], "not quiet for long enough"
    rig.now += 0.01
    rig.call("load")
    assert rig.lines() == ["tier 'nvme': load works again"]


def test_a_medium_that_fails_now_and_then_for_an_hour_is_a_line_or_two_a_minute(rig: Rig) -> None:
    for _ in range(600):
        rig.call("load", GONE)
        rig.now += QUIET_SECONDS + 1
        rig.call("load")
    assert len(rig.lines()) <= 2 * 60 + 20
    rig.now += 10 * MAX_QUIET_SECONDS
    rig.call("load")
    rig.lines()
    rig.call("load", GONE)
    rig.now += QUIET_SECONDS
    rig.call("load")
    assert len(rig.lines()) == 2, "after a long quiet time, it is told at once again"


def test_a_breaker_that_opens_and_closes_for_an_hour_is_two_lines_a_minute(rig: Rig) -> None:
    end = rig.now + 3600
    openings = 0
    while rig.now < end:
        while rig.health.available:
            rig.now += 0.01
            rig.call("lookup", GONE)
        openings += 1
        rig.probe()
    lines = rig.lines()
    assert rig.total("breaker_opened") == openings
    assert openings <= 60 + 6, "six pauses until they last a minute"
    assert len(lines) == 1 + 2 * openings
    assert lines.count("tier 'nvme' is used again, after 60 s") > 50


def test_a_load_on_trial_that_fails_is_not_told(rig: Rig) -> None:
    for _ in range(5):
        rig.call("load", GONE)
    rig.lines()
    for _ in range(20):
        rig.probe()
        assert rig.call("load", GONE)
        assert not rig.call("load", GONE)
    assert rig.lines() == []
    assert rig.total("breaker_opened") == 21
    assert rig.total("breaker_open") == 1


def test_what_is_refused_is_counted_and_asking_changes_nothing(rig: Rig) -> None:
    assert rig.health.admits("store")
    for _ in range(5):
        rig.call("store", GONE)
    assert [rig.health.admits(operation) for operation in ("lookup", "load", "store", "delete")] == [False] * 4
    assert rig.total("breaker_refused") == 4
    rig.probe()
    assert all(rig.health.admits("store") for _ in range(3))
    assert rig.call("store")
    assert rig.health.available
    assert rig.total("breaker_refused") == 4


def test_observers_hear_of_each_change_once(rig: Rig) -> None:
    for _ in range(50):
        rig.call("load", GONE)
    rig.probe()
    rig.call("load")
    rig.now += QUIET_SECONDS
    rig.call("load")
    cause = "OSError: the medium is gone"
    assert rig.observers.events == [
        events.TierFailing("nvme", "load", cause),
        events.TierUnavailable("nvme", f"load failed (first of 2 objects: {key(1)}): {cause}"),
        events.TierAvailable("nvme", 1.0),
        events.TierRecovered("nvme", "load"),
    ]
    assert rig.total("breaker_open") == 0


def test_the_late_success_of_a_call_does_not_tell_that_it_works_again(rig: Rig) -> None:
    late = rig.health.begin("load")
    assert late is not None
    rig.health.timed_out("load", key(1))
    rig.now += 2 * QUIET_SECONDS
    rig.health.succeeded(late)
    assert len(rig.lines()) == 1
    rig.call("load")
    assert rig.lines() == ["tier 'nvme': load works again"]


def test_the_other_half_learns_of_each_change_once(rig: Rig) -> None:
    assert rig.health.take_refusal_change() == 0
    for _ in range(5):
        rig.call("load", GONE)
    assert [rig.health.take_refusal_change() for _ in range(2)] == [1, 0]
    rig.probe()
    assert [rig.health.take_refusal_change() for _ in range(2)] == [-1, 0], "a half open breaker tries loads"
    rig.call("load", GONE)
    rig.probe()
    assert rig.health.take_refusal_change() == 0, "what has changed in between and back is no change"


def test_threads_that_tell_it_all_at_once(rig: Rig) -> None:
    def tell(seed: int) -> None:
        for number in range(2000):
            if number % 7 == seed:
                rig.health.timed_out("load", key(number))
            rig.call("load", GONE if number % 10 else None)
            rig.health.take_refusal_change()
            if rig.health.begin_probe():
                rig.health.probe_ended(None)

    clock = iter(range(10**9))
    rig.health._clock = lambda: float(next(clock))  # every look at it is a second later
    threads = [threading.Thread(target=tell, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rig.total("breaker_open") == (0 if rig.health.available else 1)
    told = [event for event in rig.observers.events if isinstance(event, events.TierUnavailable | events.TierAvailable)]
    assert told
    assert all(isinstance(event, events.TierUnavailable) == (index % 2 == 0) for index, event in enumerate(told))
