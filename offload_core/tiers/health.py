"""The health of one tier in one process: what fails, whether the tier is used, and what is told of both.

An operation *fails* from its first failure until it works again; a tier is *unavailable* while its circuit breaker is
not closed, or its backend hangs in ``open``. Each change of these is logged once, as a warning, and told to observers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload_core.api import events
from offload_core.api.errors import BackendError
from offload_core.api.keys import ObjectKey
from offload_core.config.limits import Limits
from offload_core.plugins.observers import EventDelivery
from offload_core.runtime.metrics import Counters
from offload_core.tiers.circuit_breaker import Call, CircuitBreaker, State

logger = logging.getLogger(__name__)

QUIET_SECONDS = 5.0
"""An operation is told to work again when one succeeds so long after the last failure."""

MAX_QUIET_SECONDS = 60.0
"""The same for one that was told to work again, time after time, and failed soon again."""


@dataclass
class _Trouble:
    """What is known of an operation that has failed. ``told`` until it is told to work again."""

    last_failure: float
    quiet_seconds: float
    told: bool = True


class TierHealth:
    """Told how a tier's calls end, asked whether another may begin. Thread-safe; nothing waits.

    Args:
        limits: the tier's own.
        observers: told what happens; ``None`` when there are none.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        limits: Limits,
        counters: Counters,
        observers: EventDelivery | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._limits = limits
        self._counters = counters
        self._observers = observers
        self._clock = clock
        self._breaker = CircuitBreaker(
            limits.breaker_failures, limits.breaker_pause_seconds, limits.breaker_max_pause_seconds
        )
        self._lock = threading.Lock()
        self._troubles: dict[events.Operation, _Trouble] = {}
        self._cause = ""
        self._unavailable_since: float | None = None
        self._hangs_in_open = False
        self._is_open = False
        self._refusal_told = False
        self.on_open_breaker: Callable[[], None] = lambda: None
        """Called on any thread when the breaker has opened, for whoever sends probes."""

    def admits(self, operation: events.Operation) -> bool:
        """Return whether a call of ``operation`` would be let through; a refusal is counted as ``breaker_refused``."""
        with self._lock:
            admitted = self._admits(operation)
        if not admitted:
            self._counters.add("breaker_refused", self._name)
        return admitted

    def begin(self, operation: events.Operation) -> Call | None:
        """Begin a call: ``None``, counted as ``breaker_refused``, when it is not let through.

        Each call is ended by :meth:`succeeded` or :meth:`failed`, and in any case by :meth:`ended`.
        """
        with self._lock:
            call = None if self._hangs_in_open else self._breaker.begin(operation)
        if call is None:
            self._counters.add("breaker_refused", self._name)
        return call

    def succeeded(self, call: Call) -> None:
        """Note that the backend has done its part, whatever became of each object."""
        with self._lock:
            now, before = self._clock(), self._breaker.state
            trouble = self._troubles.get(call.operation)
            if trouble is not None and trouble.told and not self._breaker.may_be_late(call):
                self._tell_of_recovery(call.operation, trouble, now)
            self._breaker.succeeded(call, now)
            self._tell_of_change(before, now)

    def failed(self, call: Call, keys: Sequence[ObjectKey], error: Exception) -> None:
        """Note that a call for ``keys`` raised ``error``."""
        cause = f"{type(error).__name__}: {error}"
        defect = isinstance(error, BackendError) or not isinstance(error, OSError)
        cure = "if its medium is well, tell the backend's author" if defect else "check its medium"
        with self._lock:
            now, before = self._clock(), self._breaker.state
            first = f"first of {len(keys)} objects: {keys[0]}" if keys else "no objects"
            self._tell_of_failure(call.operation, f"failed ({first}): {cause}", cause, cure, now)
            self._breaker.failed(call, now)
            self._tell_of_change(before, now)

    def ended(self, call: Call) -> None:
        """Note that a call has ended, however; after :meth:`succeeded` and :meth:`failed` this does nothing."""
        with self._lock:
            self._breaker.ended(call)

    def timed_out(self, operation: events.Operation, first_key: ObjectKey | None) -> None:
        """Note that a call has missed its deadline; it goes on, and may still be told to have ended."""
        key = f"{operation}_timeout_seconds"
        seconds = getattr(self._limits, key, None)
        cause = f"no answer within {key}" + (f" = {seconds:g}" if seconds is not None else "")
        cure = f"check that its medium answers, or raise {key} if it is merely slow"
        with self._lock:
            now, before = self._clock(), self._breaker.state
            self._tell_of_failure(operation, f"failed (first object: {first_key}): {cause}", cause, cure, now)
            self._breaker.timed_out(operation, now)
            self._tell_of_change(before, now)

    @property
    def available(self) -> bool:
        """Whether the tier is used without reserve."""
        return self._unavailable_since is None

    def take_change(self) -> int:
        """Return the change, since the last call, of how many tiers refuse lookups here: 1, 0 or -1."""
        with self._lock:
            refuses = not self._admits("lookup")
            change = int(refuses) - int(self._refusal_told)
            self._refusal_told = refuses
            return change

    def opening_hangs(self) -> None:
        """Note that the backend has not come back from ``open`` in time: the tier is not used until it does."""
        key = "open_timeout_seconds"
        with self._lock:
            if self._is_open or self._hangs_in_open:
                return
            self._hangs_in_open = True
            self._cause = f"open has not come back within {key} = {self._limits.open_timeout_seconds:g}"
            logger.warning(
                "tier %r: %s; the engine starts without it, and uses it when its medium answers. Check that, or "
                "raise %s if it is merely slow.", self._name, self._cause, key,
            )  # fmt: skip
            self._becomes_unavailable(self._clock())

    def opened(self) -> None:
        """Note that the backend is open, in time or not."""
        with self._lock:
            self._is_open = True
            if self._hangs_in_open:
                self._hangs_in_open = False
                self._becomes_available(self._clock())

    def opening_failed(self, error: Exception) -> None:
        """Note that ``open`` raised. Where the engine has started without the tier, it stays without."""
        with self._lock:
            if self._hangs_in_open:
                logger.warning(
                    "tier %r: open failed after all: %s: %s. The engine goes on without it; mend it and restart.",
                    self._name, type(error).__name__, error,
                )  # fmt: skip

    @property
    def probe_in_seconds(self) -> float | None:
        """In what time the next probe is due; ``None`` when none is."""
        with self._lock:
            at = self._breaker.probe_at
            return None if at is None else max(0.0, at - self._clock())

    def begin_probe(self) -> bool:
        """Begin a probe, if one is due; it is ended by :meth:`probe_ended`."""
        with self._lock:
            at = self._breaker.probe_at
            if at is None or self._clock() < at:
                return False
            self._breaker.begin_probe()
            return True

    def probe_ended(self, error: Exception | None) -> None:
        """Note that the probe has come back, in whatever time."""
        if error is not None:
            logger.debug("tier %r: a probe failed: %s: %s", self._name, type(error).__name__, error)
        with self._lock:
            now, before = self._clock(), self._breaker.state
            self._breaker.probe_ended(error is None, now)
            self._tell_of_change(before, now)

    def _admits(self, operation: events.Operation) -> bool:
        return not self._hangs_in_open and self._breaker.admits(operation)

    def _tell_of_failure(self, operation: events.Operation, what: str, cause: str, cure: str, now: float) -> None:
        self._cause = f"{operation} {what}"
        trouble = self._troubles.get(operation)
        if trouble is not None and trouble.told:
            trouble.last_failure = now
            logger.debug("tier %r: %s %s", self._name, operation, what)
            return
        quiet_seconds = QUIET_SECONDS
        if trouble is not None and now - trouble.last_failure < 2 * MAX_QUIET_SECONDS:
            quiet_seconds = min(2 * trouble.quiet_seconds, MAX_QUIET_SECONDS)
        self._troubles[operation] = _Trouble(now, quiet_seconds)
        logger.warning(
            "tier %r: %s %s. The engine goes on without; %s. Further failures are counted and not logged until it "
            "works again.", self._name, operation, what, cure,
        )  # fmt: skip
        if self._observers:
            self._observers.emit(events.TierFailing(self._name, operation, cause))

    def _tell_of_recovery(self, operation: events.Operation, trouble: _Trouble, now: float) -> None:
        if now - trouble.last_failure < trouble.quiet_seconds:
            return
        trouble.told = False
        logger.warning("tier %r: %s works again", self._name, operation)
        if self._observers:
            self._observers.emit(events.TierRecovered(self._name, operation))

    def _tell_of_change(self, before: State, now: float) -> None:
        """Compare the breaker's state with what it was before."""
        state = self._breaker.state
        if state == before:
            return
        if state == "open":
            self._counters.add("breaker_opened", self._name)
            if before == "closed":
                logger.warning(
                    "tier %r is not used for now, after %d failures in a row; the last: %s. Check its medium; it is "
                    "tried again after %.3g s, then at intervals of up to %.3g s, and used when it answers.",
                    self._name, self._limits.breaker_failures, self._cause, self._breaker.pause_seconds,
                    self._limits.breaker_max_pause_seconds,
                )  # fmt: skip
                self._becomes_unavailable(now)
            self.on_open_breaker()
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
        logger.warning("tier %r is used again, after %.3g s", self._name, seconds)
        if self._observers:
            self._observers.emit(events.TierAvailable(self._name, seconds))
