"""Daemon threads for blocking calls, with replacements for threads that are stuck.

A thread that hangs in a system call on a dead mount cannot be stopped. The interpreter waits at exit for the threads of
``concurrent.futures.ThreadPoolExecutor``, but not for daemon threads.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
ExecutorT = TypeVar("ExecutorT", bound=Executor)


@dataclass(eq=False)
class _Worker:
    """The state of one thread. ``call_began`` is ``None`` while the thread is idle."""

    call_began: float | None = None
    stuck: bool = False


class DaemonExecutor(Executor):
    """An executor with at most ``max_threads`` daemon threads, which it starts as needed.

    A thread that is in one call for longer than ``stuck_after_seconds`` is *stuck*: it may never return. A stuck thread
    does not count towards ``max_threads``, so another thread replaces it. There are at most twice ``max_threads``
    threads in all. A thread that returns while there are enough others ends.

    Args:
        max_threads: number of threads that are not stuck.
        name: first part of the threads' names.
        stuck_after_seconds: by default, no thread is ever stuck.
        on_stuck: called on any thread with the change of the number of stuck threads: 1 or -1.
    """

    def __init__(
        self,
        max_threads: int,
        name: str,
        stuck_after_seconds: float = math.inf,
        on_stuck: Callable[[int], None] = lambda change: None,
    ) -> None:
        self._max_threads = max_threads
        self._name = name
        self._stuck_after_seconds = stuck_after_seconds
        self._on_stuck = on_stuck
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._stuck = 0
        self._started = 0
        self._unfinished = 0
        self._closed = False

    @property
    def stuck(self) -> int:
        """Number of threads that were stuck at the last check."""
        return self._stuck

    @property
    def busy(self) -> bool:
        """``True`` while calls run or wait."""
        return self._unfinished > 0

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call.

        If a thread cannot be started, the call waits for one that lives and is not stuck.

        Raises:
            RuntimeError: after :meth:`shutdown`. Also if no thread can be started, and none would run the call. In
                both cases it never runs.
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
                raise RuntimeError(f"the threads of {self._name!r} are shut down and take no more calls")
            self._unfinished += 1
            try:
                self._start_threads()
            except (RuntimeError, MemoryError) as error:  # the system has no thread left, or no memory for one
                if all(worker.stuck for worker in self._workers):
                    self._unfinished -= 1
                    raise RuntimeError(f"no thread of {self._name!r} can be started: {error}") from error
            self._calls.put(call)
        return future

    def replace_stuck(self) -> None:
        """Find threads that are stuck, and start others for the waiting calls. Call this periodically."""
        with self._lock:
            limit = time.monotonic() - self._stuck_after_seconds
            for worker in self._workers:
                if not worker.stuck and worker.call_began is not None and worker.call_began < limit:
                    worker.stuck = True
                    self._stuck += 1
                    self._on_stuck(1)
            if not self._closed:
                with suppress(RuntimeError, MemoryError):  # the next check tries again
                    self._start_threads()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads after the queued calls. ``wait`` has no effect: this never waits, because a call may hang."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._workers:
                    self._calls.put(None)

    def _start_threads(self) -> None:
        wanted = min(self._unfinished - self._stuck, self._max_threads) + self._stuck
        while len(self._workers) < min(wanted, 2 * self._max_threads):
            worker = _Worker()
            self._workers.add(worker)
            name = f"{self._name}-{self._started}"
            self._started += 1
            try:
                threading.Thread(target=self._run, args=(worker,), name=name, daemon=True).start()
            except BaseException:
                self._workers.discard(worker)
                raise

    def _run(self, worker: _Worker) -> None:
        while True:
            call = self._calls.get()
            if call is None:
                return
            worker.call_began = time.monotonic()
            call()
            del call  # do not keep the last call's buffers alive while idle
            with self._lock:
                worker.call_began = None
                self._unfinished -= 1
                if worker.stuck:
                    worker.stuck = False
                    self._stuck -= 1
                    self._on_stuck(-1)
                    if len(self._workers) - self._stuck > self._max_threads:
                        self._workers.discard(worker)
                        return


class CallLimit:
    """A limit on the calls of one caller that wait or run on an executor, for callers that never wait. Thread-safe.

    Args:
        calls: the most calls at a time.
    """

    def __init__(self, calls: int) -> None:
        self._places = threading.Semaphore(calls)

    def submit(self, executor: Executor, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T] | None:
        """Queue a call; ``None``, and it never runs, if the limit is reached.

        Raises:
            RuntimeError: see :meth:`DaemonExecutor.submit`. It takes no place.
        """
        if not self._places.acquire(blocking=False):
            return None
        try:
            future = executor.submit(fn, *args, **kwargs)
        except RuntimeError:
            self._places.release()
            raise
        future.add_done_callback(lambda _: self._places.release())
        return future


def executors_of_tier(name: str, make: Callable[[str], ExecutorT]) -> tuple[ExecutorT, ExecutorT, ExecutorT]:
    """Return a tier's executors: for its stores and all else, for its loads, and for its lookups.

    Args:
        make: returns an executor, whose threads' names begin so.
    """
    return make(name), make(f"{name}-load"), make(f"{name}-lookup")


class StuckThreadTimer:
    """A timer on the running loop that replaces the stuck threads of executors while one of them is busy.

    Args:
        executors: the executors to check.
        seconds: interval between two checks.
    """

    def __init__(self, executors: Sequence[DaemonExecutor], seconds: float) -> None:
        self._executors = executors
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def start(self) -> None:
        """Start the timer. Call this on the loop when a call begins."""
        if self._timer is None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._check)

    def close(self) -> None:
        """Stop the timer. Call this on the loop."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        self._timer = None
        for executor in self._executors:
            executor.replace_stuck()
        if any(executor.busy for executor in self._executors):
            self.start()
