"""The circuit breaker against an oracle that goes through the whole history for every answer, and its corner cases."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from offload_core.api.events import Operation
from offload_core.tiers.circuit_breaker import CALM_SECONDS, Call, CircuitBreaker, State

OPERATIONS: tuple[Operation, ...] = ("lookup", "load", "store", "delete")
MAX_FAILURES, PAUSE, MAX_PAUSE = 3, 6.0, 20.0


@dataclass(frozen=True)
class Happened:
    """One line of the history. ``began`` is the line at which the call, or the probe, began."""

    what: str
    at: float
    operation: Operation = "lookup"
    began: int = -1


@dataclass
class Oracle:
    """Knows the history and the states so far, as ``(state, first line, since when, tripped by)``."""

    lines: list[Happened] = field(default_factory=list)
    states: list[tuple[State, int, float, Operation]] = field(default_factory=lambda: [("closed", 0, 0.0, "lookup")])

    @property
    def state(self) -> State:
        return self.states[-1][0]

    @property
    def first_line(self) -> int:
        return self.states[-1][1]

    @property
    def tripped_by(self) -> Operation:
        return self.states[-1][3]

    def enter(self, state: State, tripped_by: Operation | None = None) -> None:
        self.states.append((state, len(self.lines), self.lines[-1].at, tripped_by or self.tripped_by))

    def overtaken(self, line: Happened, index: int) -> bool:
        """Return whether a timeout of its operation was counted while the call of ``line`` ran."""
        return any(one.what == "timeout" and one.operation == line.operation for one in self.lines[line.began : index])

    def row(self, operation: Operation) -> int:
        """Failures in this state since the last success that counts."""
        count = 0
        for index in range(len(self.lines) - 1, self.first_line - 1, -1):
            line = self.lines[index]
            if line.operation != operation:
                continue
            if line.what == "succeeded" and not self.overtaken(line, index):
                break
            own = line.what == "failed" and line.began >= self.first_line and not self.overtaken(line, index)
            count += own or line.what == "timeout"
        return count

    def probing(self) -> bool:
        probes = [line.what for line in self.lines if line.what.startswith("probe")]
        return bool(probes) and probes[-1] == "probe"

    def on_trial(self, operation: Operation) -> bool:
        """Return whether a load or store runs that began in this state."""
        began = {
            index
            for index, line in enumerate(self.lines)
            if index >= self.first_line and line.what == "began" and line.operation == operation
        }
        ended = {line.began for line in self.lines if line.what in ("succeeded", "failed", "ended")}
        return operation in ("load", "store") and bool(began - ended)

    def admits(self, operation: Operation) -> bool:
        return self.state == "closed" or (self.state == "half open" and not self.on_trial(operation))

    def pause(self) -> float:
        """Work out all pauses from the first one on."""
        pause, closed_at = 0.0, 0.0
        for number, (state, first, since, _) in enumerate(self.states):
            if state == "closed":
                closed_at = since
            elif state == "open":
                calm = self.states[number - 1][0] == "closed" and since - closed_at >= max(CALM_SECONDS, pause)
                pause = PAUSE if calm or not pause else min(MAX_PAUSE, 2 * pause)
                last = self.states[number + 1][1] if number + 1 < len(self.states) else len(self.lines)
                for line in self.lines[first:last]:
                    if line.what == "probe failed" and line.began >= first:
                        pause = min(MAX_PAUSE, 2 * pause)
        return pause

    def probe_at(self) -> float | None:
        if self.state != "open" or self.probing():
            return None
        since = self.states[-1][2]
        for line in self.lines[self.first_line :]:
            if line.what == "probe failed" and line.began >= self.first_line:
                since = line.at
        return since + self.pause()

    def happens(self, line: Happened) -> None:
        """Add a line, and go to the next state where it leads there."""
        was_probing = self.probing()
        self.lines.append(line)
        index, fatal = len(self.lines) - 1, line.what == "timeout"
        if line.what == "failed":
            fatal = line.began >= self.first_line and not self.overtaken(line, index)
        if self.state == "open":
            answers = line.what == "probe answered" or (
                line.what == "succeeded" and was_probing and line.operation in ("lookup", self.tripped_by)
            )
            if answers:
                self.enter("half open" if self.tripped_by in ("load", "store") else "closed")
        elif fatal and (self.state == "half open" or self.row(line.operation) >= MAX_FAILURES):
            self.enter("open", line.operation)
        elif self.state == "half open" and line.what == "succeeded" and line.operation == self.tripped_by:
            counts = line.began >= self.first_line and not self.overtaken(line, index)
            self.enter("closed") if counts else None


class BreakerMachine(RuleBasedStateMachine):
    """Calls begin and end in any order, in time or late; probes come back or hang."""

    calls = Bundle("calls")

    def __init__(self) -> None:
        super().__init__()
        self.breaker = CircuitBreaker(MAX_FAILURES, PAUSE, MAX_PAUSE)
        self.oracle = Oracle()
        self.now = 0.0
        self.probe_line = 0

    def happens(self, what: str, operation: Operation = "lookup", began: int = -1) -> int:
        self.oracle.happens(Happened(what, self.now, operation, began))
        return len(self.oracle.lines) - 1

    @rule(seconds=st.sampled_from([0.5, 3.0, 10.0, 15.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(target=calls, operation=st.sampled_from(OPERATIONS))
    def begin(self, operation: Operation) -> tuple[Call | None, int]:
        call = self.breaker.begin(operation)
        assert (call is not None) == self.oracle.admits(operation)
        return call, self.happens("began" if call else "refused", operation)

    @rule(begun=consumes(calls), how=st.sampled_from(["succeeded", "failed", "ended"]))
    def end(self, begun: tuple[Call | None, int], how: str) -> None:
        call, line = begun
        if call is None:
            return
        if how == "succeeded":
            self.breaker.succeeded(call, self.now)
        elif how == "failed":
            self.breaker.failed(call, self.now)
        self.breaker.ended(call)
        self.happens(how, call.operation, line)

    @rule(operation=st.sampled_from(OPERATIONS), times=st.integers(1, MAX_FAILURES))
    def time_out(self, operation: Operation, times: int) -> None:
        for _ in range(times):
            self.breaker.timed_out(operation, self.now)
            self.happens("timeout", operation)

    @rule(operation=st.sampled_from(OPERATIONS), how=st.sampled_from(["succeeded", "failed"]), times=st.integers(1, 3))
    def calls_in_no_time(self, operation: Operation, how: str, times: int) -> None:
        for _ in range(times):
            self.end(self.begin(operation), how)

    @precondition(lambda self: self.breaker.probe_at is not None)
    @rule(waits=st.booleans())
    def probe(self, waits: bool) -> None:
        at = self.breaker.probe_at
        assert at is not None
        self.now = max(self.now, at) if waits else self.now
        if at <= self.now:
            self.breaker.begin_probe()
            self.probe_line = self.happens("probe")

    @precondition(lambda self: self.oracle.probing())
    @rule(answered=st.booleans())
    def probe_comes_back(self, answered: bool) -> None:
        self.breaker.probe_ended(answered, self.now)
        self.happens("probe answered" if answered else "probe failed", began=self.probe_line)

    @invariant()
    def is_as_the_history_says(self) -> None:
        assert self.breaker.state == self.oracle.state
        assert [self.breaker.admits(one) for one in OPERATIONS] == [self.oracle.admits(one) for one in OPERATIONS]
        assert self.breaker.pause_seconds == self.oracle.pause()
        assert self.breaker.probe_at == self.oracle.probe_at()


BreakerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestBreakerMachine = BreakerMachine.TestCase


@pytest.fixture
def breaker() -> CircuitBreaker:
    return CircuitBreaker(MAX_FAILURES, PAUSE, MAX_PAUSE)


def is_in(breaker: CircuitBreaker, state: State) -> bool:
    return breaker.state == state


def fail(breaker: CircuitBreaker, operation: Operation, now: float, times: int = MAX_FAILURES) -> None:
    for _ in range(times):
        call = breaker.begin(operation)
        assert call is not None
        breaker.failed(call, now)


def probe(breaker: CircuitBreaker, answered: bool = True) -> float:
    """Send the next probe when it is due; returns the time."""
    now = breaker.probe_at
    assert now is not None
    breaker.begin_probe()
    breaker.probe_ended(answered, now)
    return now


def succeed(breaker: CircuitBreaker, operation: Operation, now: float) -> None:
    call = breaker.begin(operation)
    assert call is not None
    breaker.succeeded(call, now)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_row_of_failures_opens_it_and_a_success_in_between_does_not(
    breaker: CircuitBreaker, operation: Operation
) -> None:
    fail(breaker, operation, 0.0, MAX_FAILURES - 1)
    succeed(breaker, operation, 0.0)
    fail(breaker, operation, 0.0, MAX_FAILURES - 1)
    succeed(breaker, "load" if operation == "lookup" else "lookup", 0.0)
    assert is_in(breaker, "closed")
    fail(breaker, operation, 0.0, 1)
    assert is_in(breaker, "open")
    assert not any(map(breaker.admits, OPERATIONS))


@pytest.mark.parametrize(("operation", "state"), [("lookup", "closed"), ("delete", "closed"), ("load", "half open")])
def test_where_a_probe_leads(breaker: CircuitBreaker, operation: Operation, state: State) -> None:
    fail(breaker, operation, 5.0)
    assert probe(breaker) == 5.0 + PAUSE
    assert is_in(breaker, state)


def test_half_open_one_load_and_one_store_at_a_time_are_tried(breaker: CircuitBreaker) -> None:
    fail(breaker, "load", 0.0)
    now = probe(breaker)
    load, store = breaker.begin("load"), breaker.begin("store")
    assert load is not None
    assert store is not None
    assert [breaker.begin("load"), breaker.begin("store")] == [None, None]
    assert breaker.begin("lookup") is not None
    breaker.succeeded(store, now)
    assert is_in(breaker, "half open"), "it was loads that had failed"
    breaker.succeeded(load, now)
    assert is_in(breaker, "closed")


def test_a_load_on_trial_that_was_cancelled_makes_room_for_the_next(breaker: CircuitBreaker) -> None:
    fail(breaker, "load", 0.0)
    probe(breaker)
    load = breaker.begin("load")
    assert load is not None
    breaker.ended(load)
    assert breaker.admits("load")


def test_pauses_grow_to_their_limit_and_are_short_again_after_a_calm_time(breaker: CircuitBreaker) -> None:
    fail(breaker, "lookup", 0.0)
    pauses, before = [], 0.0
    for _ in range(5):
        now = probe(breaker, answered=False)
        pauses.append(now - before)
        before = now
    assert pauses == [6.0, 12.0, 20.0, 20.0, 20.0]
    now = probe(breaker)
    fail(breaker, "lookup", now + MAX_PAUSE - 0.1)
    assert breaker.pause_seconds == MAX_PAUSE, "not calm for as long as the pause was"
    now = probe(breaker)
    fail(breaker, "lookup", now + MAX_PAUSE)
    assert breaker.pause_seconds == PAUSE
    now = probe(breaker)
    fail(breaker, "lookup", now + CALM_SECONDS - 0.1)
    assert breaker.pause_seconds == 2 * PAUSE, "however short the pause was, a moment is not calm"


def test_a_medium_that_flaps_gets_longer_and_longer_pauses(breaker: CircuitBreaker) -> None:
    now, pauses = 0.0, []
    for _ in range(5):
        fail(breaker, "load", now)
        pauses.append(breaker.pause_seconds)
        now = probe(breaker)
        succeed(breaker, "load", now)
        assert is_in(breaker, "closed")
    assert pauses == [6.0, 12.0, 20.0, 20.0, 20.0]


def test_the_late_success_of_a_call_says_nothing_but_that_the_medium_answers(breaker: CircuitBreaker) -> None:
    load = breaker.begin("load")
    assert load is not None
    for _ in range(MAX_FAILURES - 1):
        breaker.timed_out("load", 1.0)
    breaker.succeeded(load, 2.0)
    breaker.timed_out("load", 3.0)
    assert is_in(breaker, "open"), "the late success has not ended the row"

    late = Call("load", 0, 0)
    breaker.succeeded(late, 3.5)
    assert is_in(breaker, "open"), "no probe waits for it"
    breaker.begin_probe()
    breaker.succeeded(late, 30.0)
    assert is_in(breaker, "half open")
    breaker.probe_ended(answered=False, now=60.0)
    assert is_in(breaker, "half open"), "the hung probe is history"


def test_failures_of_calls_from_before_it_opened_are_not_counted_again(breaker: CircuitBreaker) -> None:
    old = [breaker.begin("lookup") for _ in range(2 * MAX_FAILURES)]
    for call in old[:MAX_FAILURES]:
        assert call is not None
        breaker.failed(call, 0.0)
    now = probe(breaker)
    for call in old[MAX_FAILURES:]:
        assert call is not None
        breaker.failed(call, now)
    assert is_in(breaker, "closed")


def test_a_probe_that_hung_through_a_time_in_which_all_was_well_does_not_lengthen_the_next_pause(
    breaker: CircuitBreaker,
) -> None:
    old = breaker.begin("lookup")
    assert old is not None
    fail(breaker, "lookup", 0.0)
    breaker.begin_probe()
    breaker.succeeded(old, PAUSE)
    assert is_in(breaker, "closed")
    fail(breaker, "lookup", PAUSE)
    assert breaker.probe_at is None, "one probe at a time, and it still hangs"
    breaker.probe_ended(answered=False, now=2 * PAUSE)
    assert breaker.probe_at == PAUSE + 2 * PAUSE
