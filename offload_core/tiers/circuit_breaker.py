"""A circuit breaker: a medium that fails time after time is left alone, tried now and then, and used again.

The states, and what leads from one to the next:

========= =========================================== =================================================================
state     what is admitted                            what ends it
========= =========================================== =================================================================
closed    everything                                  ``max_failures`` failures of one operation in a row: open
open      nothing; one probe at a time, after a pause a probe that succeeds: closed where lookups or deletions had
                                                      failed, half open where loads or stores had
half open lookups and deletions; one load and one     a success of the operation that had failed: closed; any failure
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
"""How long it must have been closed, at the least, for its next pause to be a short one."""

_TRIED_ONE_BY_ONE: tuple[Operation, ...] = ("load", "store")


@dataclass(frozen=True, eq=False)
class Call:
    """A call that was admitted, to be handed back when it has ended.

    Args:
        period: how many changes of state there had been when it began.
        timeouts: how many timeouts of its operation had been counted when it began.
    """

    operation: Operation
    period: int
    timeouts: int


class CircuitBreaker:
    """The breaker of one tier.

    Args:
        max_failures: so many failures or timeouts of one operation, with no success of it in between, open it.
        pause_seconds: from its opening to a probe; doubled when a probe fails, and when it opens again too soon.
        max_pause_seconds: the longest pause.
    """

    def __init__(self, max_failures: int, pause_seconds: float, max_pause_seconds: float) -> None:
        self._max_failures = max_failures
        self._first_pause = min(pause_seconds, max_pause_seconds)
        self._max_pause = max_pause_seconds
        self._state: State = "closed"
        self._period = 0
        self._rows: Counter[Operation] = Counter()
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
        """The operation whose failures opened it last."""
        return self._tripped_by

    @property
    def pause_seconds(self) -> float:
        """The pause of this opening, or of the last one; 0 before the first."""
        return self._pause

    @property
    def probe_at(self) -> float | None:
        """When the next probe is due; ``None`` when none is: the breaker is not open, or a probe is under way."""
        return self._probe_at if self._state == "open" and not self._probing else None

    def admits(self, operation: Operation) -> bool:
        """Return whether a call may begin; asking changes nothing."""
        if self._state == "half open":
            return operation not in self._trials
        return self._state == "closed"

    def begin(self, operation: Operation) -> Call | None:
        """Begin a call: ``None`` when it is not admitted. Each is to be ended."""
        if not self.admits(operation):
            return None
        call = Call(operation, self._period, self._timeouts[operation])
        if self._state == "half open" and operation in _TRIED_ONE_BY_ONE:
            self._trials[operation] = call
        return call

    def succeeded(self, call: Call, now: float) -> None:
        """End a call that went well.

        One that began before the last timeout of its operation may be the late one itself: it is no evidence, except
        that the medium answers, which is what a probe under way waits for.
        """
        self.ended(call)
        if self._state == "open":
            if self._probing and call.operation in (self._tripped_by, "lookup"):
                self._medium_answers(now)
        elif not self.may_be_late(call):
            self._rows[call.operation] = 0
            if self._state == "half open" and call.operation == self._tripped_by and call.period == self._period:
                self._close(now)

    def failed(self, call: Call, now: float) -> None:
        """End a call that raised. One of an earlier state, or whose timeout may have been counted, is not counted."""
        self.ended(call)
        if call.period == self._period and not self.may_be_late(call):
            self._count(call.operation, now)

    def ended(self, call: Call) -> None:
        """End a call of which no more is known, such as one that was cancelled. After the other two it does nothing."""
        if self._trials.get(call.operation) is call:
            del self._trials[call.operation]

    def timed_out(self, operation: Operation, now: float) -> None:
        """Count a call that has missed its deadline, and goes on."""
        self._timeouts[operation] += 1
        self._count(operation, now)

    def begin_probe(self) -> None:
        """Note that a probe is under way; to be called when :attr:`probe_at` has come, and not otherwise."""
        self._probing = True
        self._period_of_probe = self._period

    def probe_ended(self, answered: bool, now: float) -> None:
        """Note that the probe has come back, however late."""
        self._probing = False
        if self._state != "open":
            return
        if answered:
            self._medium_answers(now)
        elif self._period_of_probe == self._period:
            self._pause = min(2 * self._pause, self._max_pause)
            self._probe_at = now + self._pause

    def may_be_late(self, call: Call) -> bool:
        """Return whether a timeout that has been counted may be this call's."""
        return call.timeouts != self._timeouts[call.operation]

    def _count(self, operation: Operation, now: float) -> None:
        if self._state == "open":
            return
        self._rows[operation] += 1
        if self._state == "half open" or self._rows[operation] >= self._max_failures:
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
        self._rows.clear()
        self._trials.clear()
