"""A batch of objects that several threads work on: each thread takes one object after the other."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ObjectBatch(Generic[T]):
    """A batch of objects. It ends with its last object; threads that come later find nothing to do and touch nothing.

    Args:
        work: the blocking function for one object.
        objects: the arguments of each call of ``work``.
    """

    def __init__(self, work: Callable[..., T], objects: Sequence[tuple[Any, ...]]) -> None:
        self._work = work
        self._waiting = deque(enumerate(objects))
        self._objects = len(objects)
        self._results: dict[int, T] = {}
        self._errors: dict[int, Exception] = {}
        self._threads = 0
        self._ended_threads: list[BaseException | None] = []
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()

    def start(self, executor: Executor, threads: int, thread_calls: set[Future[None]]) -> asyncio.Future[None]:
        """Start the work on so many threads. The returned future ends with the last object; do not cancel it.

        Args:
            thread_calls: has the calls on threads until each of them ends. They may end after the last object.
        """
        self._threads = threads
        for _ in range(threads):
            call = executor.submit(self.work_on_waiting)
            thread_calls.add(call)
            call.add_done_callback(thread_calls.discard)
            call.add_done_callback(self._thread_ended)
        return self._ended

    def results(self) -> list[T]:
        """Return the results in the order of the objects, or raise the first error."""
        failed: list[BaseException] = [self._errors[index] for index in sorted(self._errors)]
        if not failed and len(self._results) < self._objects:  # no thread has worked
            failed = [error for error in self._ended_threads if error is not None]
        if failed:
            raise failed[0]
        return [self._results[index] for index in range(self._objects)]

    def work_on_waiting(self) -> None:
        """Work on one waiting object after the other. Blocks."""
        while True:
            try:
                index, arguments = self._waiting.popleft()
            except IndexError:
                return
            try:
                self._results[index] = self._work(*arguments)
            except Exception as error:
                self._errors[index] = error
            if len(self._results) + len(self._errors) == self._objects:
                self._notify()

    def _thread_ended(self, call: Future[None]) -> None:
        self._ended_threads.append(call.exception())
        if len(self._ended_threads) == self._threads:
            self._notify()

    def _notify(self) -> None:
        with suppress(RuntimeError):  # the loop is closed, and so nobody waits
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)
