"""Work on many objects at once, within a limit on memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


async def in_parallel(items: AsyncIterator[T], work: Callable[[T], Awaitable[None]], workers: int) -> None:
    """Run ``work`` on every item, ``workers`` at a time; no item is taken before a worker is free.

    The first error ends all of it. Cancellation cancels every ``work`` and waits for it.
    """
    turn = asyncio.Lock()  # an asynchronous generator cannot be asked twice at once

    async def worker() -> None:
        while True:
            async with turn:
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(worker())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


class ByteBudget:
    """Lets calls hold at most ``total_bytes`` together. Used by one event loop."""

    def __init__(self, total_bytes: int) -> None:
        self._free_bytes = total_bytes
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def hold(self, nbytes: int) -> AsyncIterator[None]:
        """Wait for ``nbytes``, no more than the total, and hold them."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._free_bytes >= nbytes)
            self._free_bytes -= nbytes
        try:
            yield
        finally:
            self._free_bytes += nbytes
            async with self._changed:
                self._changed.notify_all()
