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
    """An executor that runs one call at a time, in turns with the event loop; a seed picks the order.

    A call begins in one turn of the loop and is done in a later one; the loop waits for its thread. So calls that were
    submitted together run in any order, one after the other. A cancellation after a number of turns always comes at the
    same point. Calls never overlap in time; the tests of C1, C4 and C6 have such calls.

    Args:
        loop: the loop to take turns with.
        seed: the seed of the order.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, seed: int) -> None:
        super().__init__(max_workers=1, thread_name_prefix="turns")
        self._loop = loop
        self._random = random.Random(seed)
        self._waiting: list[Callable[[], bool]] = []

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See :meth:`concurrent.futures.Executor.submit`."""
        future: Future[T] = Future()
        turns = 1 + self._random.randrange(4)

        def call() -> bool:
            """Begin the call, and run it some turns later; once it has begun, a cancellation cannot stop it."""
            nonlocal turns
            if not future.running():
                return future.set_running_or_notify_cancel()
            turns -= 1
            if turns > 0:
                return True
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
