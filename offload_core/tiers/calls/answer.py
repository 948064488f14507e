"""The end of a backend's call, whichever way it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from offload_core.api.errors import BackendError

T = TypeVar("T")


async def answer(call: Awaitable[T]) -> T:
    """Await a backend's call. If the backend cancels its own call, that is a failure like any other."""
    try:
        return await call
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise BackendError("the backend cancelled its own call") from None
