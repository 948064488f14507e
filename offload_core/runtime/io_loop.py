"""The event loop that all I/O of a process shares, on a daemon thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class IoLoop:
    """The process's event loop, on a daemon thread, shared by both halves of the connector."""

    _shared: IoLoop | None = None
    _users = 0
    _class_lock = threading.Lock()

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="offload-io", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls) -> IoLoop:
        """Return the process's loop, starting it for the first user. Pair with :meth:`release`."""
        with cls._class_lock:
            if cls._shared is None:
                cls._shared = cls()
            cls._users += 1
            return cls._shared

    def release(self) -> None:
        """Drop one use; the last one stops the loop. Tasks still running on it never run again."""
        cls = type(self)
        with cls._class_lock:
            cls._users -= 1
            if cls._users > 0:
                return
            cls._shared = None
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=1.0)
        if not self._thread.is_alive() and not asyncio.all_tasks(self.loop):
            self.loop.close()
        # Otherwise a task still waits for a hung thread: the loop stays as it is and goes with the process.

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start ``coroutine`` on the loop from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)


def log_unexpected(future: Future[Any]) -> None:
    """Log an error that nobody awaits: it is a defect of the core, since tiers turn errors into outcomes."""
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.error("a coroutine on the I/O loop ended in an unexpected error", exc_info=error)


async def run_all(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all at once and to their ends; only then the first unexpected error is raised. Cancelled, it cancels them."""
    for error in await asyncio.gather(*coroutines, return_exceptions=True):
        if error is not None:
            raise error
