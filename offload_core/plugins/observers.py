"""Brings events to observers without ever holding up those to whom they happen."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import wait

from offload_core.api.events import Event
from offload_core.plugins.loading import FOREIGN_ERRORS, describe
from offload_core.plugins.registry import Observer
from offload_core.runtime.metrics import Counters
from offload_core.runtime.threads import DaemonExecutor

logger = logging.getLogger(__name__)

_MAX_WAITING_EVENTS = 1024

# One thread for the process, started with the first event: no observer is called by two threads at once, although an
# engine in one process opens its tiers twice.
_thread = DaemonExecutor(1, "offload-observers")


class EventDelivery:
    """Tells observers what happens, in order, on a thread that is theirs.

    Args:
        observers: whom to tell.
        counters: where events that found no room are counted.
    """

    def __init__(self, observers: Sequence[Observer], counters: Counters) -> None:
        self._observers = tuple(observers)
        self._counters = counters
        self._room = threading.Semaphore(_MAX_WAITING_EVENTS)
        self._told: set[Observer] = set()
        self._dropping = False
        self._closed = False

    def emit(self, event: Event) -> None:
        """Queue an event, or drop and count it when too many wait. Never waits. Thread-safe."""
        if self._room.acquire(blocking=False):
            _thread.submit(self._deliver, event)
            return
        self._counters.add("events_dropped", event.tier)
        if not self._dropping:
            self._dropping = True
            logger.warning(
                "observers (%s) are too slow: %d events wait and more are dropped, which events_dropped counts",
                ", ".join(str(observer.report) for observer in self._observers), _MAX_WAITING_EVENTS,
            )  # fmt: skip

    def close(self, seconds: float) -> None:
        """Wait until what is queued has been delivered, at most ``seconds``; the rest is dropped."""
        late = wait([_thread.submit(int)], timeout=seconds).not_done  # whatever it is, it comes after the events
        self._closed = True
        if late:
            logger.warning("observers were still busy after %s s; the events that wait are dropped", seconds)

    def _deliver(self, event: Event) -> None:
        try:
            for observer in () if self._closed else self._observers:
                try:
                    observer.notify(event)
                except FOREIGN_ERRORS as error:
                    if observer not in self._told:
                        self._told.add(observer)
                        logger.error(
                            "%s: offload_observe failed on %s: %s; it goes on being told of events, and further "
                            "failures are not logged", observer.report, event, describe(error), exc_info=error,
                        )  # fmt: skip
        finally:
            self._room.release()
