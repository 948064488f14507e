"""The results of LMCache's tasks, and the file descriptors that wake its controllers."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from lmcache.v1.platform import create_event_notifier

Result = TypeVar("Result")


class TaskResults(Generic[Result]):
    """The results of one kind of task, until a controller takes them. Thread-safe."""

    def __init__(self) -> None:
        self._notifier = create_event_notifier()
        self._results: dict[int, Result] = {}
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def event_fd(self) -> int:
        """The descriptor that becomes readable with each result."""
        return int(self._notifier.fileno())

    def put(self, task: int, result: Result) -> None:
        """Give out the result of a task. After :meth:`close` nobody wants it."""
        with self._lock:
            if not self._is_closed:
                self._results[task] = result
                self._notifier.notify()

    def take(self, task: int) -> Result | None:
        """Return the result of a task once; ``None`` if there is none yet."""
        with self._lock:
            return self._results.pop(task, None)

    def take_all(self) -> dict[int, Result]:
        """Return all results since the last call, by task."""
        with self._lock:
            taken, self._results = self._results, {}
        return taken

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._notifier.close()
