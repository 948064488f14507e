"""Threads: one event loop per process for all I/O, and daemon threads for blocking calls.

Everything here is a daemon thread. A thread that hangs in a system call on a dead mount cannot be stopped, and the
interpreter would wait for it at exit if it came from ``concurrent.futures.ThreadPoolExecutor``.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class DaemonExecutor(Executor):
    """Runs calls on at most ``max_threads`` daemon threads, started as needed."""

    def __init__(self, max_threads: int, name: str) -> None:
        self._max_threads = max_threads
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call.

        Raises:
            RuntimeError: after :meth:`shutdown`.
        """
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            if self._closed:
                raise RuntimeError(f"the threads of {self._name!r} are shut down")
            self._calls.put(call)
            self._unfinished += 1
            if len(self._threads) < min(self._unfinished, self._max_threads):
                thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads after the calls that are queued. Never waits, whatever ``wait`` says: a call may hang."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._calls.put(None)

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            if call is None:
                return
            call()
            del call  # do not keep the last call's buffers alive while idle
            with self._lock:
                self._unfinished -= 1


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
