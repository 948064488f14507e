"""The end of a backend's call, whichever way it ends."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable
from typing import TypeVar

from offload_core.api.errors import BackendError, text_of

T = TypeVar("T")


async def answer(call: Awaitable[T]) -> T:
    """Await a backend's call. If the backend cancels its own call, that is a failure like any other.

    All other errors that are no ``Exception``, such as ``SystemExit``, and errors without a readable text are failures
    too. They would end the event loop, or the code that handles errors.

    Raises:
        Exception: the backend's error. If it cannot be handled as such, a :class:`BackendError` names it.
        asyncio.CancelledError: the caller's task is cancelled.
    """
    try:
        return await call
    except Exception as error:
        if _is_readable(error):
            raise
        raise BackendError(f"the backend has raised {type(error).__name__}: {text_of(error)}") from error
    except GeneratorExit:  # nobody awaits this coroutine any more
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError | KeyboardInterrupt) and task is not None and task.cancelling():
            raise
        if isinstance(error, asyncio.CancelledError):
            raise BackendError("the backend cancelled its own call") from None
        raise BackendError(f"the backend has raised {type(error).__name__}: {text_of(error)}") from error


def awaitable(method: str, returned: Awaitable[T]) -> Awaitable[T]:
    """Return the result of a backend's method, to be awaited.

    Only a call tells whether a plain function is right: it may return another coroutine.

    Args:
        method: the name of the method.

    Raises:
        BackendError: nobody can await it. The error names the cure.
    """
    if not inspect.isawaitable(returned):
        raise BackendError(
            f"{method} returned an object of type {type(returned).__name__}, which cannot be awaited; "
            f"write async def {method}"
        )
    return returned


def _is_readable(error: Exception) -> bool:
    try:
        str(error)
    except Exception:
        return False
    return True
