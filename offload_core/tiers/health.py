"""The health of one tier in one process: failing operations, availability, and their log lines and events.

An operation *fails* from its first failure until it works again. A tier is *unavailable* while its circuit breaker is
not closed, or while its backend hangs in ``open``. Each change is logged once, as a warning, and sent to observers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload_core.api import events
from offload_core.api.context import tier_label
from offload_core.api.errors import BackendError
from offload_core.api.keys import ObjectKey
from offload_core.config.limits import Limits
from offload_core.plugins.observers import EventSink
from offload_core.runtime.metrics import Counters
from offload_core.tiers.circuit_breaker import Call, CircuitBreaker, State

logger = logging.getLogger(__name__)

QUIET_SECONDS = 5.0
"""An operation works again if it succeeds and its last failure is so long ago."""

MAX_QUIET_SECONDS = 60.0
"""Upper bound of the same time, which doubles while an operation keeps failing soon after it worked again."""


@dataclass
class _Failure:
    """The state of an operation that has failed; ``reported`` until it is reported to work again."""

    last_failure: float
    quiet_seconds: float
    reported: bool = True


class TierHealth:
    """Takes the results of a tier's calls, and admits or refuses further calls. Thread-safe; no method waits.

    Args:
        limits: the limits in force for this tier.
        observers: receivers of events; ``None`` when there are none.
        clock: monotonic seconds.
        label: the words for the tier in log lines; by default without a half of the engine.
    """

    def __init__(
        self,
        name: str,
        limits: Limits,
        counters: Counters,
        observers: EventSink | None = None,
        clock: Callable[[], float] = time.monotonic,
        label: str = "",
    ) -> None:
        self._name = name
        self._label = label or tier_label(name)
        self._limits = limits
        self._counters = counters
        self._observers = observers
        self._clock = clock
        self._breaker = CircuitBreaker(
            limits.breaker_failures, limits.breaker_pause_seconds, limits.breaker_max_pause_seconds
        )
        self._lock = threading.Lock()
        self._failures: dict[events.Operation, _Failure] = {}
        self._cause = ""
        self._unavailable_since: float | None = None
        self._hangs_in_open = False
        self._is_open = False
        self._refusal_reported = False
        self.on_breaker_opened: Callable[[], None] = lambda: None
        """Called on any thread when the breaker has opened, so that the prober sends probes."""

    def admits(self, operation: events.Operation) -> bool:
        """Return whether a call of ``operation`` may begin; a refusal is counted as ``breaker_refused``."""
        with self._lock:
            admitted = self._admits(operation)
        if not admitted:
            self._counters.add("breaker_refused", self._name)
        return admitted

    def begin(self, operation: events.Operation) -> Call | None:
        """Begin a call. A refused call gives ``None`` and is counted as ``breaker_refused``.

        End each call by :meth:`succeeded` or :meth:`failed`, and in every case by :meth:`ended`.
        """
        with self._lock:
            call = None if self._hangs_in_open else self._breaker.begin(operation)
        if call is None:
            self._counters.add("breaker_refused", self._name)
        return call

    def succeeded(self, call: Call) -> None:
        """Record a call that the backend completed, with any outcome per object."""
        with self._lock:
            now, before = self._clock(), self._breaker.state
            failure = self._failures.get(call.operation)
            if failure is not None and failure.reported and not self._breaker.may_be_late(call):
                self._report_recovery(call.operation, failure, now)
            self._breaker.succeeded(call, now)
            self._report_change(before, now)

    def failed(self, call: Call, keys: Sequence[ObjectKey], error: Exception) -> None:
        """Record that a call for ``keys`` raised ``error``."""
        cause = f"{type(error).__name__}: {error}"
        defect = isinstance(error, BackendError) or not isinstance(error, OSError)
        cure = "if its medium works, tell the backend's author" if defect else "check its medium"
        with self._lock:
            now, before = self._clock(), self._breaker.state
            first = f"first of {len(keys)} objects: {keys[0]}" if keys else "no objects"
            self._report_failure(call.operation, f"failed ({first}): {cause}", cause, cure, now)
            self._breaker.failed(call, now)
            self._report_change(before, now)

    def ended(self, call: Call) -> None:
        """Record that a call has ended. After :meth:`succeeded` and :meth:`failed` this does nothing."""
        with self._lock:
            self._breaker.ended(call)

    def timed_out(self, operation: events.Operation, first_key: ObjectKey | None) -> None:
        """Record that a call has missed its deadline. The call goes on, and its end is recorded later."""
        key = f"{operation}_timeout_seconds"
        seconds = getattr(self._limits, key, None)
        cause = f"no answer within {key}" + (f" = {seconds:g}" if seconds is not None else "")
        cure = f"check that its medium answers, or raise {key} if it is merely slow"
        with self._lock:
            now, before = self._clock(), self._breaker.state
            self._report_failure(operation, f"failed (first object: {first_key}): {cause}", cause, cure, now)
            self._breaker.timed_out(operation, now)
            self._report_change(before, now)

    @property
    def available(self) -> bool:
        """True if the tier is used for all operations."""
        return self._unavailable_since is None

    def take_refusal_change(self) -> int:
        """Return 1 if the tier has begun to refuse lookups since the last call, -1 if it has ended, otherwise 0."""
        with self._lock:
            refuses = not self._admits("lookup")
            change = int(refuses) - int(self._refusal_reported)
            self._refusal_reported = refuses
            return change

    def open_timed_out(self) -> None:
        """Record that ``open`` has missed its deadline. The tier is not used until ``open`` returns."""
        key = "open_timeout_seconds"
        with self._lock:
            if self._is_open or self._hangs_in_open:
                return
            self._hangs_in_open = True
            self._cause = f"open did not finish within {key} = {self._limits.open_timeout_seconds:g}"
            logger.warning(
                "%s: %s; the engine starts without it, and uses it when its medium answers. Check its medium, "
                "or raise %s if it is merely slow.", self._label, self._cause, key,
            )  # fmt: skip
            self._becomes_unavailable(self._clock())

    def opened(self) -> None:
        """Record that the backend is open, before or after its deadline."""
        with self._lock:
            self._is_open = True
            if self._hangs_in_open:
                self._hangs_in_open = False
                self._becomes_available(self._clock())

    def open_failed(self, error: Exception) -> None:
        """Record that ``open`` raised. An engine that has started without the tier stays without it."""
        with self._lock:
            if self._hangs_in_open:
                logger.warning(
                    "%s: open failed after its deadline: %s: %s. The engine goes on without it; repair it and "
                    "restart.", self._label, type(error).__name__, error,
                )  # fmt: skip

    @property
    def probe_in_seconds(self) -> float | None:
        """Seconds until the next probe is due; ``None`` if no probe is due."""
        with self._lock:
            at = self._breaker.probe_at
            return None if at is None else max(0.0, at - self._clock())

    def begin_probe(self) -> bool:
        """Begin a probe, if one is due; end it by :meth:`probe_ended`."""
        with self._lock:
            at = self._breaker.probe_at
            if at is None or self._clock() < at:
                return False
            self._breaker.begin_probe()
            return True

    def probe_ended(self, error: Exception | None) -> None:
        """Record the end of a probe, before or after its deadline."""
        if error is not None:
            logger.debug("%s: a probe failed: %s: %s", self._label, type(error).__name__, error)
        with self._lock:
            now, before = self._clock(), self._breaker.state
            self._breaker.probe_ended(error is None, now)
            self._report_change(before, now)

    def _admits(self, operation: events.Operation) -> bool:
        return not self._hangs_in_open and self._breaker.admits(operation)

    def _report_failure(self, operation: events.Operation, description: str, cause: str, cure: str, now: float) -> None:
        self._cause = f"{operation} {description}"
        failure = self._failures.get(operation)
        if failure is not None and failure.reported:
            failure.last_failure = now
            logger.debug("%s: %s %s", self._label, operation, description)
            return
        quiet_seconds = QUIET_SECONDS
        if failure is not None and now - failure.last_failure < 2 * MAX_QUIET_SECONDS:
            quiet_seconds = min(2 * failure.quiet_seconds, MAX_QUIET_SECONDS)
        self._failures[operation] = _Failure(now, quiet_seconds)
        logger.warning(
            "%s: %s %s. The engine goes on without it; %s. Further failures are counted and not logged until it "
            "works again.", self._label, operation, description, cure,
        )  # fmt: skip
        if self._observers:
            self._observers.emit(events.TierFailing(self._name, operation, cause))

    def _report_recovery(self, operation: events.Operation, failure: _Failure, now: float) -> None:
        if now - failure.last_failure < failure.quiet_seconds:
            return
        failure.reported = False
        logger.warning("%s: %s works again", self._label, operation)
        if self._observers:
            self._observers.emit(events.TierRecovered(self._name, operation))

    def _report_change(self, before: State, now: float) -> None:
        """Report a change of the breaker's state since ``before``."""
        state = self._breaker.state
        if state == before:
            return
        if state == "open":
            self._counters.add("breaker_opened", self._name)
            if before == "closed":
                logger.warning(
                    "%s is not used for now, after %d failures in a row; the last: %s. Check its medium; it is "
                    "tried again after %.3g s, then at intervals of up to %.3g s, and used when it answers.",
                    self._label, self._limits.breaker_failures, self._cause, self._breaker.pause_seconds,
                    self._limits.breaker_max_pause_seconds,
                )  # fmt: skip
                self._becomes_unavailable(now)
            self.on_breaker_opened()
        elif state == "closed":
            self._becomes_available(now)

    def _becomes_unavailable(self, now: float) -> None:
        self._unavailable_since = now
        self._counters.add("breaker_open", self._name)
        if self._observers:
            self._observers.emit(events.TierUnavailable(self._name, self._cause))

    def _becomes_available(self, now: float) -> None:
        assert self._unavailable_since is not None
        seconds = now - self._unavailable_since
        self._unavailable_since = None
        self._counters.add("breaker_open", self._name, -1)
        logger.warning("%s is used again, after %.3g s", self._label, seconds)
        if self._observers:
            self._observers.emit(events.TierAvailable(self._name, seconds))
