"""Delivery of events to observers, without delaying the tiers."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Protocol

from offload_core.api.events import Event
from offload_core.plugins.loading import PLUGIN_ERRORS, describe
from offload_core.plugins.registry import Observer
from offload_core.runtime.metrics import Counters
from offload_core.runtime.threads import CallLimit, DaemonExecutor

logger = logging.getLogger(__name__)

_MAX_WAITING_EVENTS = 1024

# One thread for the whole process, which the first event starts. An engine in one process opens its tiers twice, but no
# observer is ever called by two threads at once.
_thread = DaemonExecutor(1, "offload-observers")


def _forget_thread() -> None:
    global _thread
    _thread = DaemonExecutor(1, "offload-observers")


os.register_at_fork(after_in_child=_forget_thread)  # a fork has no thread of its parent


class EventSink(Protocol):
    """Takes the events of tiers to the observers."""

    def emit(self, event: Event) -> None:
        """Take an event, or drop it. Thread-safe; never waits."""
        ...

    def close(self, seconds: float) -> None:
        """Wait at most ``seconds`` for the delivery of the events so far."""
        ...


class EventDelivery:
    """A queue that calls the observers for each event, in order, on a thread of their own.

    Args:
        observers: the observers to call.
        counters: the place to count dropped events.
    """

    def __init__(self, observers: Sequence[Observer], counters: Counters) -> None:
        self._observers = tuple(observers)
        self._counters = counters
        self._limit = CallLimit(_MAX_WAITING_EVENTS)
        self._logged_failures: set[Observer] = set()
        self._dropping = False
        self._closed = False

    def emit(self, event: Event) -> None:
        """Queue an event. If too many wait, or there is no thread, drop and count it. Thread-safe; never waits."""
        is_full = False
        with suppress(RuntimeError):  # no thread can be started
            if self._limit.submit(_thread, self._deliver, event):
                return
            is_full = True
        self._counters.add("events_dropped", event.tier)
        if is_full and not self._dropping:
            self._dropping = True
            logger.warning(
                "observers (%s) are too slow: %d events wait, and more are dropped and counted in events_dropped",
                ", ".join(str(observer.report) for observer in self._observers), _MAX_WAITING_EVENTS,
            )  # fmt: skip

    def close(self, seconds: float) -> None:
        """Wait at most ``seconds`` for the delivery of the queued events, and drop the rest."""
        late: Collection[Future[int]] = ()
        with suppress(RuntimeError):  # no thread can be started: no event waits
            late = wait([_thread.submit(int)], timeout=seconds).not_done  # this call comes after the events
        self._closed = True
        if late:
            logger.warning("observers were still busy after %s s; the waiting events are dropped", seconds)

    def _deliver(self, event: Event) -> None:
        for observer in () if self._closed else self._observers:
            try:
                observer.notify(event)
            except PLUGIN_ERRORS as error:
                if observer not in self._logged_failures:
                    self._logged_failures.add(observer)
                    logger.error(
                        "%s: offload_observe failed on %s: %s; it still gets events, and its further failures are "
                        "not logged", observer.report, event, describe(error), exc_info=error,
                    )  # fmt: skip
