"""A circuit breaker: a medium that keeps failing gets a pause, is probed, and is used again once it works.

The states and their transitions:

========= =========================================== =================================================================
state     admitted calls                              end of the state
========= =========================================== =================================================================
closed    all calls                                   ``max_failures`` failures of one operation in a row: open
open      none; one probe at a time, after a pause    a probe that succeeds: closed after failures of lookups or
                                                      deletions, half open after failures of loads or stores
half open lookups and deletions; one load and one     a success of the failed operation: closed; any failure
          store at a time                             or timeout: open
========= =========================================== =================================================================

A pure state machine: no clock, no lock, no log. Methods take the time in seconds, of a clock that never goes back.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from offload_core.api.events import Operation

State = Literal["closed", "open", "half open"]

CALM_SECONDS = 10.0
"""Shortest time in the closed state after which the next pause is a short one again."""

_TRIED_ONE_BY_ONE: tuple[Operation, ...] = ("load", "store")


@dataclass(frozen=True, eq=False)
class Call:
    """An admitted call, to be passed back when it has ended.

    Args:
        period: number of changes of state before it began.
        timeouts: number of timeouts of its operation before it began.
    """

    operation: Operation
    period: int
    timeouts: int


class CircuitBreaker:
    """The breaker of one tier.

    Args:
        max_failures: failures or timeouts of one operation in a row that open the breaker.
        pause_seconds: first pause before a probe. It doubles when a probe fails, and when the breaker reopens too soon.
        max_pause_seconds: longest pause.
    """

    def __init__(self, max_failures: int, pause_seconds: float, max_pause_seconds: float) -> None:
        self._max_failures = max_failures
        self._first_pause = min(pause_seconds, max_pause_seconds)
        self._max_pause = max_pause_seconds
        self._state: State = "closed"
        self._period = 0
        self._failures_in_a_row: Counter[Operation] = Counter()
        self._timeouts: Counter[Operation] = Counter()
        self._trials: dict[Operation, Call] = {}
        self._tripped_by: Operation = "lookup"
        self._pause = 0.0
        self._closed_at = 0.0
        self._probe_at = 0.0
        self._probing = False
        self._period_of_probe = 0

    @property
    def state(self) -> State:
        """The present state."""
        return self._state

    @property
    def tripped_by(self) -> Operation:
        """The operation whose failures opened the breaker last."""
        return self._tripped_by

    @property
    def pause_seconds(self) -> float:
        """The current pause, or the last one; 0 before the first."""
        return self._pause

    @property
    def probe_at(self) -> float | None:
        """Time of the next probe; ``None`` if the breaker is not open, or while a probe runs."""
        return self._probe_at if self._state == "open" and not self._probing else None

    def admits(self, operation: Operation) -> bool:
        """Return whether a call may begin. This changes no state."""
        if self._state == "half open":
            return operation not in self._trials
        return self._state == "closed"

    def begin(self, operation: Operation) -> Call | None:
        """Begin a call; ``None`` if it is not admitted. Every admitted call must be ended."""
        if not self.admits(operation):
            return None
        call = Call(operation, self._period, self._timeouts[operation])
        if self._state == "half open" and operation in _TRIED_ONE_BY_ONE:
            self._trials[operation] = call
        return call

    def succeeded(self, call: Call, now: float) -> None:
        """End a call that succeeded.

        A call that began before the last timeout of its operation may be the overdue call itself. It proves only that
        the medium answers, which ends a running probe.
        """
        self.ended(call)
        if self._state == "open":
            if self._probing and call.operation in (self._tripped_by, "lookup"):
                self._medium_answers(now)
        elif not self.may_be_late(call):
            self._failures_in_a_row[call.operation] = 0
            if self._state == "half open" and call.operation == self._tripped_by and call.period == self._period:
                self._close(now)

    def failed(self, call: Call, now: float) -> None:
        """End a call that raised. It is not counted if it began in an earlier state, or its timeout may be counted."""
        self.ended(call)
        if call.period == self._period and not self.may_be_late(call):
            self._count(call.operation, now)

    def ended(self, call: Call) -> None:
        """End a call without a result, such as a cancelled one. After ``succeeded`` and ``failed`` it does nothing."""
        if self._trials.get(call.operation) is call:
            del self._trials[call.operation]

    def timed_out(self, operation: Operation, now: float) -> None:
        """Count a call that has missed its deadline and still runs."""
        self._timeouts[operation] += 1
        self._count(operation, now)

    def begin_probe(self) -> None:
        """Record that a probe runs. Call this only when :attr:`probe_at` has come."""
        self._probing = True
        self._period_of_probe = self._period

    def probe_ended(self, answered: bool, now: float) -> None:
        """Record the end of the probe, before or after its deadline."""
        self._probing = False
        if self._state != "open":
            return
        if answered:
            self._medium_answers(now)
        elif self._period_of_probe == self._period:
            self._pause = min(2 * self._pause, self._max_pause)
            self._probe_at = now + self._pause

    def may_be_late(self, call: Call) -> bool:
        """Return whether a counted timeout may belong to this call."""
        return call.timeouts != self._timeouts[call.operation]

    def _count(self, operation: Operation, now: float) -> None:
        if self._state == "open":
            return
        self._failures_in_a_row[operation] += 1
        if self._state == "half open" or self._failures_in_a_row[operation] >= self._max_failures:
            self._open(operation, now)

    def _open(self, operation: Operation, now: float) -> None:
        calm = self._state == "closed" and now - self._closed_at >= max(CALM_SECONDS, self._pause)
        self._pause = self._first_pause if calm or not self._pause else min(2 * self._pause, self._max_pause)
        self._probe_at = now + self._pause
        self._tripped_by = operation
        self._enter("open")

    def _medium_answers(self, now: float) -> None:
        if self._tripped_by in _TRIED_ONE_BY_ONE:
            self._enter("half open")
        else:
            self._close(now)

    def _close(self, now: float) -> None:
        self._closed_at = now
        self._enter("closed")

    def _enter(self, state: State) -> None:
        self._state = state
        self._period += 1
        self._failures_in_a_row.clear()
        self._trials.clear()
