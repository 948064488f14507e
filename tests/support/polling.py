"""A wait for a condition that signals nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable

LIMIT_SECONDS = 60
_POLL_SECONDS = 0.01


def wait_until(done: Callable[[], bool], problem: str) -> None:
    """Wait until ``done`` returns true.

    Args:
        problem: the failure's words, such as ``no mount``.

    Raises:
        AssertionError: it did not within a minute.
    """
    pause = threading.Event()
    for _ in range(int(LIMIT_SECONDS / _POLL_SECONDS)):
        if done():
            return
        pause.wait(_POLL_SECONDS)
    raise AssertionError(f"{problem} within {LIMIT_SECONDS} s")
