"""The time one request has waited for storage, so that all its waits together end at a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

WaitReason = Literal["lookup", "load"]


class WaitingTime:
    """Adds up one request's waits by reason. At most one wait runs at a time.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[WaitReason, float] = {"lookup": 0.0, "load": 0.0}
        self._running: tuple[WaitReason, float] | None = None

    def begin(self, reason: WaitReason) -> None:
        """Begin a wait. A running wait for the same reason goes on; one for another reason ends."""
        if self._running is None or self._running[0] != reason:
            self.end()
            self._running = (reason, self._clock())

    def end(self) -> None:
        """End the running wait, if any."""
        if self._running is not None:
            reason, since = self._running
            self._seconds[reason] += self._clock() - since
            self._running = None

    def reset(self, reason: WaitReason) -> None:
        """End the running wait and set the time for ``reason`` to zero.

        This is for time in which the engine would not have run the request anyway.
        """
        self.end()
        self._seconds[reason] = 0.0

    def seconds(self, reason: WaitReason) -> float:
        """Return the time for ``reason`` until now, a running wait included."""
        running = self._clock() - self._running[1] if self._running and self._running[0] == reason else 0.0
        return self._seconds[reason] + running
