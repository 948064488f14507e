"""Tasks of LMCache's L2 that a session has stopped waiting for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from offload_backend_lmcache.server.object_store import StoreError

logger = logging.getLogger(__name__)

MAX_ABANDONED = 256


class AbandonedTasks:
    """Tasks of an L2 that did not end in time. Their locks are released when they end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._releases: list[Callable[[], bool]] = []

    def add(self, release: Callable[[], bool]) -> None:
        """Add a task. ``release`` unlocks the objects of a task that has ended, and returns whether it has."""
        with self._lock:
            self._releases.append(release)

    def collect(self) -> None:
        """Release the locks of tasks that have ended meanwhile. A task whose release fails is given up, and logged.

        Raises:
            StoreError: too many tasks do not end, so the L2 must not get more of them.
        """
        if not self._releases:
            return
        with self._lock:
            releases, self._releases = self._releases, []
        pending = [release for release in releases if not _has_ended(release)]
        with self._lock:
            self._releases += pending
            count = len(self._releases)
        if count > MAX_ABANDONED:
            raise StoreError(f"LMCache's L2 has not answered {count} requests; is it alive?")


def _has_ended(release: Callable[[], bool]) -> bool:
    try:
        return release()
    except Exception:
        logger.exception("offload-core's module cannot release the locks of a task of LMCache's L2")
        return True  # the locks stay until LMCache's time limit for them
