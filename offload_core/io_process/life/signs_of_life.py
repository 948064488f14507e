"""The watch over an I/O process that may stand still: by a signal, a debugger, or a thread that keeps its lock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

_PING_SECONDS = 1.0


class SignsOfLife:
    """Asks a process for a sign of life, again and again. All methods run on the event loop.

    Ticks are counted, and not seconds: after a stop of this process too, the other one has time to answer.

    Args:
        ask: sends the question; its future ends with the answer. An error is no answer.
        on_silence: called once, with ``silence_seconds``, if no answer has come for that long.
    """

    def __init__(
        self, ask: Callable[[], asyncio.Future[Any]], on_silence: Callable[[float], None], silence_seconds: float
    ) -> None:
        self._ask = ask
        self._on_silence = on_silence
        self._silence_seconds = silence_seconds
        self._loop = asyncio.get_running_loop()
        self._unanswered = 0
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Begin."""
        self._timer = self._loop.call_later(_PING_SECONDS, self._tick)

    def stop(self) -> None:
        """Ask no more. Harmless when repeated."""
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        if self._unanswered * _PING_SECONDS >= self._silence_seconds:
            self._on_silence(self._silence_seconds)
            return
        self._unanswered += 1
        self._ask().add_done_callback(self._answered)
        self.watch()

    def _answered(self, answer: asyncio.Future[Any]) -> None:
        if not answer.cancelled() and answer.exception() is None:
            self._unanswered = 0
