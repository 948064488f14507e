"""The event loop for all I/O of a process."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class IoLoop:
    """The process's event loop on a daemon thread. Both halves of the connector share it."""

    _shared: IoLoop | None = None
    _users = 0
    _class_lock = threading.Lock()

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="offload-io", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls) -> IoLoop:
        """Return the process's loop, and start it for the first user. Call :meth:`release` once for each call."""
        with cls._class_lock:
            if cls._shared is None:
                cls._shared = cls()
            cls._users += 1
            return cls._shared

    def release(self) -> None:
        """Give up one use of the loop. The last release stops the loop; unfinished tasks on it never run again."""
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
        # Otherwise a task still waits for a hung thread: the loop stays open until the process ends.

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start ``coroutine`` on the loop. May be called on any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)


def log_unexpected(future: Future[Any]) -> None:
    """Log the error of a future that nobody awaits. It is a defect of the core: tiers turn errors into outcomes."""
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.error(
            "a coroutine on the I/O loop ended in an unexpected error; this is a defect, please report it",
            exc_info=error,
        )


async def run_all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Run all calls at the same time and wait for all of them; then return their results, or raise the first error.

    A cancellation of this call cancels the others.
    """
    results: list[T] = []
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return results
