"""Deterministic asynchronous I/O: between two steps of the stand-in, every call that can end has ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.threads import DaemonExecutor

_QUIET_TURNS = 64
"""Turns of the loop, without a call on any thread, after which the loop counts as idle."""
_POLL_SECONDS = 0.0002
_REST_SECONDS = 60.0


class CallWatch:
    """A counter of the blocking calls that wait or run on all of the core's threads."""

    def __init__(self) -> None:
        self._calls: set[Future[Any]] = set()

    @contextmanager
    def watching(self) -> Iterator[CallWatch]:
        """Watch every :class:`DaemonExecutor` of the process."""
        original = DaemonExecutor.submit

        def submit(executor: DaemonExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            future = original(executor, fn, *args, **kwargs)
            self._calls.add(future)
            future.add_done_callback(self._calls.discard)
            return future

        DaemonExecutor.submit = submit  # type: ignore[method-assign]
        try:
            yield self
        finally:
            DaemonExecutor.submit = original  # type: ignore[method-assign]

    def settle(self) -> None:
        """Wait until the I/O loop is idle: all remaining tasks wait for an event outside the loop."""
        io = IoLoop.acquire()
        try:
            io.submit(self._quiet()).result(60)
        finally:
            io.release()

    async def _quiet(self) -> None:
        turns = 0
        while turns < _QUIET_TURNS:
            if self._calls:
                turns = 0
                await asyncio.sleep(_POLL_SECONDS)
            else:
                turns += 1
                await asyncio.sleep(0)


@contextmanager
def loop_at_rest() -> Iterator[None]:
    """Let the I/O loop do nothing during the block: no answer comes in the middle of a step."""
    begun, over = threading.Event(), threading.Event()

    def rest() -> None:
        begun.set()
        over.wait(_REST_SECONDS)

    io = IoLoop.acquire()
    try:
        io.loop.call_soon_threadsafe(rest)
        begun.wait()
        yield
    finally:
        over.set()
        io.release()
