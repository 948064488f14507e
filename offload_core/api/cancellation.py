"""Cancellation of calls whose work goes on in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any, TypeVar

from offload_core.api.errors import text_of

T = TypeVar("T")


async def to_the_end(awaitable: Awaitable[T]) -> T:
    """Await ``awaitable`` to its end; a cancellation goes through only then.

    A thread cannot be stopped. If its task were cancelled at once, the thread would go on writing into a buffer that
    belongs to another call by then (C7).
    """
    future = asyncio.ensure_future(awaitable)
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        future.exception()  # retrieved, so that asyncio does not log it as lost
        raise asyncio.CancelledError
    return future.result()


class ThreadCall(asyncio.Future[T]):
    """A call on a thread, for the running event loop. A task that awaits it is cancelled only when it has ended.

    It does the work of ``loop.run_in_executor`` and :func:`to_the_end` in fewer turns of the loop.
    """

    def __init__(self, executor: Executor, function: Callable[[], T]) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        executor.submit(function).add_done_callback(self._ended_on_thread)

    def cancel(self, msg: Any = None) -> bool:
        """Refuse: a thread cannot be stopped. asyncio then keeps the cancellation until the call has ended."""
        return False

    def _ended_on_thread(self, call: Future[T]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and so nobody waits
            self.get_loop().call_soon_threadsafe(self._end, call)

    def _end(self, call: Future[T]) -> None:
        error = asyncio.CancelledError() if call.cancelled() else call.exception()
        if error is None:
            self.set_result(call.result())
        elif isinstance(error, Exception | asyncio.CancelledError) and not isinstance(error, StopIteration):
            self.set_exception(error)
        else:  # asyncio refuses a StopIteration, and ends the loop at a SystemExit
            replacement = RuntimeError(f"a function on a thread has raised {type(error).__name__}: {text_of(error)}")
            replacement.__cause__ = error
            self.set_exception(replacement)
