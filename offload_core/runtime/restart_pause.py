"""Pauses between the replacements of a process that keeps ending."""

from __future__ import annotations

import time
from collections.abc import Callable


class RestartPause:
    """Growing pauses: the first replacement starts at once, the next after a pause, each pause twice the one before.

    A process that lived long enough was healthy, so its replacement is a first one again.

    Args:
        first_seconds: pause before the second replacement.
        longest_seconds: limit on the pauses.
        healthy_seconds: life of a healthy process.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        first_seconds: float = 0.5,
        longest_seconds: float = 60.0,
        healthy_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first_seconds = first_seconds
        self._longest_seconds = longest_seconds
        self._healthy_seconds = healthy_seconds
        self._clock = clock
        self._started: float | None = None
        self._next_seconds = 0.0

    def started(self) -> None:
        """Note that a process has started."""
        self._started = self._clock()

    def ended(self) -> float:
        """Return the pause in seconds before the replacement. Call this once for each end or failed start."""
        if self._started is not None and self._clock() - self._started >= self._healthy_seconds:
            self._next_seconds = 0.0
        self._started = None
        pause = self._next_seconds
        self._next_seconds = min(max(2 * pause, self._first_seconds), self._longest_seconds)
        return pause
