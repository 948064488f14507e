"""Threads whose work happens in the same order in every run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

CALL_LIMIT_SECONDS = 60


class TurnThreads(ThreadPoolExecutor):
    """Begins or does one call per turn of the event loop, picked by a seed, on a thread that the loop waits for.

    So what was handed in together happens in any order, one after the other, and a cancellation after so many turns of
    the loop always comes at the same point. Calls do not overlap in time, which other tests are for.

    Args:
        loop: the loop to take turns with.
        seed: picks the order.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, seed: int) -> None:
        super().__init__(max_workers=1, thread_name_prefix="turns")
        self._loop = loop
        self._random = random.Random(seed)
        self._waiting: list[Callable[[], bool]] = []

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See :meth:`concurrent.futures.Executor.submit`."""
        future: Future[T] = Future()

        def call() -> bool:
            """Begin, and in another turn do it; between the two a cancellation comes too late to stop it."""
            if not future.running():
                return future.set_running_or_notify_cancel()
            done = ThreadPoolExecutor.submit(self, fn, *args, **kwargs)
            error = done.exception(CALL_LIMIT_SECONDS)
            if error is None:
                future.set_result(done.result())
            else:
                future.set_exception(error)
            return False

        self._waiting.append(call)
        self._loop.call_soon_threadsafe(self._take_turn)
        return future

    def _take_turn(self) -> None:
        call = self._waiting.pop(self._random.randrange(len(self._waiting)))
        if call():
            self._waiting.append(call)
            self._loop.call_soon(self._take_turn)
