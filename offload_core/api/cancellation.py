"""Cancellation of calls whose work goes on in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

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
