"""How long one request has waited for storage, so that all its waits together end at a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

WaitFor = Literal["lookup", "load"]


class StorageWait:
    """Adds up one request's waits by what they are for. It waits for one thing at a time, or for nothing.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[WaitFor, float] = {"lookup": 0.0, "load": 0.0}
        self._going_on: tuple[WaitFor, float] | None = None

    def begin(self, what: WaitFor) -> None:
        """Wait for ``what`` from now on. Without effect on a wait for the same; one for something else ends."""
        if self._going_on is None or self._going_on[0] != what:
            self.end()
            self._going_on = (what, self._clock())

    def end(self) -> None:
        """Wait for nothing from now on."""
        if self._going_on is not None:
            what, since = self._going_on
            self._seconds[what] += self._clock() - since
            self._going_on = None

    def forget(self, what: WaitFor) -> None:
        """Forget all waits for ``what``, since the engine would not have run the request meanwhile anyway."""
        self.end()
        self._seconds[what] = 0.0

    def seconds(self, what: WaitFor) -> float:
        """Return how long the request has waited for ``what`` until now."""
        going_on = self._clock() - self._going_on[1] if self._going_on and self._going_on[0] == what else 0.0
        return self._seconds[what] + going_on
