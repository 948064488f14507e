"""Probes of a tier that is not used, until it answers."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence

from offload_core.api.keys import ObjectKey
from offload_core.tiers.calls.answer import answer
from offload_core.tiers.health import TierHealth

_MAX_HUNG_PROBES = 3
"""Hung probes at once. With so many, the next probe has no deadline."""


class Prober:
    """Sends the probes of one tier, on the I/O loop: one at a time, each for a key that nobody stores.

    A probe that misses its deadline counts as failed, and the next one is sent after the breaker's pause. A hung probe
    that ends later reports its result all the same.

    Args:
        contains: looks up keys on the tier; returns one answer per key.
        timeout_seconds: deadline of a probe.
    """

    def __init__(
        self,
        health: TierHealth,
        contains: Callable[[Sequence[ObjectKey]], Awaitable[object]],
        timeout_seconds: float,
    ) -> None:
        self._health = health
        self._contains = contains
        self._timeout_seconds = timeout_seconds
        self._hung: set[asyncio.Future[object]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._probe: asyncio.Task[None] | None = None
        self._closed = False
        health.on_breaker_opened = self._breaker_opened

    def attach(self) -> None:
        """Use the running loop for probes; before this call none is sent."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._schedule()

    def close(self) -> None:
        """Stop. A running probe is cancelled, and ends when the backend lets it. Call this on the I/O loop."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for probe in (self._probe, *self._hung):
            if probe is not None:
                probe.cancel()

    def _breaker_opened(self) -> None:
        if self._loop is not None and not self._closed:
            self._loop.call_soon_threadsafe(self._schedule)

    def _schedule(self) -> None:
        """Schedule the next probe."""
        if self._timer is not None:
            self._timer.cancel()
        seconds = self._health.probe_in_seconds
        if self._loop is not None and seconds is not None and not self._closed:
            self._timer = self._loop.call_later(seconds, self._send)

    def _send(self) -> None:
        if self._closed:
            return
        if self._health.begin_probe():
            self._probe = asyncio.get_running_loop().create_task(self._run_probe())
        else:
            self._schedule()

    async def _run_probe(self) -> None:
        """Look up a new key, since a backend may cache answers. If cancelled, the probe reports no result."""
        key = ObjectKey("0" * 64, "probe", secrets.token_bytes(32))
        call = asyncio.ensure_future(answer(self._contains([key])))
        timeout = self._timeout_seconds if len(self._hung) < _MAX_HUNG_PROBES else None
        try:
            await asyncio.wait([call], timeout=timeout)
        except asyncio.CancelledError:
            call.cancel()
            raise
        self._probe = None
        if call.done():
            self._probe_returned(call)
        else:
            self._hung.add(call)
            call.add_done_callback(self._probe_returned)
            self._health.probe_ended(TimeoutError(f"no answer within {self._timeout_seconds:g} s"))
            self._schedule()

    def _probe_returned(self, call: asyncio.Future[object]) -> None:
        self._hung.discard(call)
        if not call.cancelled():
            error = call.exception()
            self._health.probe_ended(error if isinstance(error, Exception) else None)
            self._schedule()
