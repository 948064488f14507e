"""Parallel work on many objects within a memory limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


async def in_parallel(items: AsyncIterator[T], work: Callable[[T], Awaitable[None]], workers: int) -> None:
    """Run ``work`` on every item, with ``workers`` calls at a time. An item is taken only when a worker is free.

    The first error ends all calls. A cancellation cancels all calls and waits for them.
    """
    next_item_lock = asyncio.Lock()  # an asynchronous generator serves one caller at a time

    async def worker() -> None:
        while True:
            async with next_item_lock:
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
    """A limit of ``total_bytes`` for concurrent calls on one event loop."""

    def __init__(self, total_bytes: int) -> None:
        self._free_bytes = total_bytes
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def reserve(self, nbytes: int) -> AsyncIterator[None]:
        """Wait until ``nbytes`` are free, and reserve them for the block. ``nbytes`` must not exceed the total."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._free_bytes >= nbytes)
            self._free_bytes -= nbytes
        try:
            yield
        finally:
            self._free_bytes += nbytes
            async with self._changed:
                self._changed.notify_all()
