"""Asks a tier that is not used, now and then, whether it answers."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence

from offload_core.api.keys import ObjectKey
from offload_core.tiers.health import TierHealth

_MAX_HUNG = 3
"""Probes that were given up and have not come back; with so many the next one is waited for without end."""


class Prober:
    """Sends the probes of one tier, on the I/O loop: one at a time, each of a key that nobody stores.

    A probe that hangs is not repeated for long, and only a few times: after its patience it counts as failed. Whenever
    it comes back after all it tells as much.

    Args:
        contains: asks the tier; returns one answer per key.
        patience_seconds: how long a probe is waited for before there may be another.
    """

    def __init__(
        self,
        health: TierHealth,
        contains: Callable[[Sequence[ObjectKey]], Awaitable[object]],
        patience_seconds: float,
    ) -> None:
        self._health = health
        self._contains = contains
        self._patience_seconds = patience_seconds
        self._hung: set[asyncio.Future[object]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._probe: asyncio.Task[None] | None = None
        self._closed = False
        health.on_open_breaker = self._breaker_opened

    def attach(self) -> None:
        """Learn of the running loop; before that no probe is sent."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._arm()

    def close(self) -> None:
        """Send no more. A probe under way is cancelled, and ends when the backend lets it. On the I/O loop."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for probe in (self._probe, *self._hung):
            if probe is not None:
                probe.cancel()

    def _breaker_opened(self) -> None:
        if self._loop is not None and not self._closed:
            self._loop.call_soon_threadsafe(self._arm)

    def _arm(self) -> None:
        """Have the next probe sent when it is due."""
        if self._timer is not None:
            self._timer.cancel()
        seconds = self._health.probe_in_seconds
        if self._loop is not None and seconds is not None and not self._closed:
            self._timer = self._loop.call_later(seconds, self._send)

    def _send(self) -> None:
        if self._closed:
            return
        if self._health.begin_probe():
            self._probe = asyncio.get_running_loop().create_task(self._ask())
        else:
            self._arm()

    async def _ask(self) -> None:
        """Ask the medium; a new key each time, since a backend may remember answers. Cancelled, it tells nothing."""
        call = asyncio.ensure_future(self._contains([ObjectKey("0" * 64, "probe", secrets.token_bytes(32))]))
        patience = self._patience_seconds if len(self._hung) < _MAX_HUNG else None
        try:
            await asyncio.wait([call], timeout=patience)
        except asyncio.CancelledError:
            call.cancel()
            raise
        self._probe = None
        if call.done():
            self._came_back(call)
        else:
            self._hung.add(call)
            call.add_done_callback(self._came_back)
            self._health.probe_ended(TimeoutError(f"no answer within {self._patience_seconds:g} s"))
            self._arm()

    def _came_back(self, call: asyncio.Future[object]) -> None:
        self._hung.discard(call)
        if not call.cancelled():
            error = call.exception()
            self._health.probe_ended(error if isinstance(error, Exception) else None)
            self._arm()
