"""The event loop for all I/O of a process."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

_STOP_SECONDS = 1.0
"""Longest wait for the loop to stop, if no task runs on it."""


class IoLoop:
    """The process's event loop on a daemon thread. Both halves of the connector share it.

    A fork of the process has no such thread, so its first user starts another loop.
    """

    _shared: IoLoop | None = None
    _users = 0
    _class_lock = threading.Lock()

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="offload-io", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls) -> IoLoop:
        """Return the process's loop, and start it for the first user. Call :meth:`release` once for each call."""
        with cls._class_lock:
            if cls._shared is None:
                cls._shared = cls()
            cls._users += 1
            return cls._shared

    @classmethod
    def forget(cls) -> None:
        """Forget the loop of the process that this one is a fork of."""
        cls._shared, cls._users, cls._class_lock = None, 0, threading.Lock()

    def release(self) -> None:
        """Give up one use of the loop. After the last release the loop stops when its tasks have ended.

        Does nothing in a fork of the process that has acquired it.

        A task may wait for a hung thread. The loop then goes on behind the caller, on its daemon thread.
        """
        cls = type(self)
        with cls._class_lock:
            if cls._shared is not self:
                return
            cls._users -= 1
            if cls._users > 0:
                return
            cls._shared = None
        was_idle: Future[bool] = Future()
        asyncio.run_coroutine_threadsafe(self._stop_when_idle(was_idle), self.loop)
        with suppress(TimeoutError):  # a callback that hangs the loop
            if was_idle.result(_STOP_SECONDS):
                self._thread.join(_STOP_SECONDS)

    async def _stop_when_idle(self, was_idle: Future[bool]) -> None:
        """Stop the loop when no other task is left; the argument gets whether there was none from the beginning."""
        own = {asyncio.current_task()}
        was_idle.set_result(not asyncio.all_tasks() - own)
        while others := asyncio.all_tasks() - own:
            await asyncio.wait(others)
        self.loop.stop()

    def _run(self) -> None:
        self.loop.run_forever()
        self.loop.close()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start ``coroutine`` on the loop. May be called on any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)


os.register_at_fork(after_in_child=IoLoop.forget)


def result_within(future: Future[T], seconds: float, otherwise: str) -> T:
    """Wait for a future, and return its result or raise its error. Not for the loop's own thread.

    Raises:
        TimeoutError: it has not ended after ``seconds``; the text is ``otherwise``. It goes on.
    """
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():  # its own error
            raise
        raise TimeoutError(otherwise) from None


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
