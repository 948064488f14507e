"""Tasks of LMCache's L2 that a session has stopped waiting for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from offload_backend_lmcache.server.object_store import StoreError

logger = logging.getLogger(__name__)

MAX_ABANDONED = 256


class _Task(NamedTuple):
    release: Callable[[], bool]
    adapter: Any | None


class AbandonedTasks:
    """Tasks of an L2 that did not end in time. Their locks are released when they end.

    Args:
        adapters: returns LMCache's present L2 adapters.
    """

    def __init__(self, adapters: Callable[[], list[Any]]) -> None:
        self._adapters = adapters
        self._lock = threading.Lock()
        self._tasks: list[_Task] = []
        self._count = 0  # with the tasks that a thread is asking

    def add(self, release: Callable[[], bool], adapter: Any | None = None) -> None:
        """Add a task.

        Args:
            release: unlocks the objects of a task that has ended, and returns whether it has.
            adapter: the adapter whose task it is. Once LMCache has removed the adapter, the task counts no longer.
                ``None``: the task is LMCache's own, which ends it by itself then.
        """
        with self._lock:
            self._tasks.append(_Task(release, adapter))
            self._count += 1

    def collect(self) -> None:
        """Release the locks of tasks that have ended meanwhile. A task whose release fails is given up, and logged."""
        if not self._tasks:
            return
        present = {id(adapter) for adapter in self._adapters()}
        with self._lock:
            tasks, self._tasks = self._tasks, []
        left = [task for task in tasks if task.adapter is None or id(task.adapter) in present]
        pending = [task for task in left if not _has_ended(task.release)]
        with self._lock:
            self._tasks += pending
            self._count -= len(tasks) - len(pending)

    def check(self) -> None:
        """Check whether the L2 may get more tasks.

        Raises:
            StoreError: too many tasks do not end.
        """
        if self._count > MAX_ABANDONED:
            raise StoreError(f"LMCache's L2 has not answered {self._count} requests; is it alive?")


def _has_ended(release: Callable[[], bool]) -> bool:
    try:
        return release()
    except Exception:
        logger.exception("offload-core's module cannot release the locks of a task of LMCache's L2")
        return True  # the locks stay until LMCache's time limit for them
