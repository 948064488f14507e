"""The lookups of one tier: their deadlines, and the limit on those that run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from offload_core.api.keys import ObjectKey
from offload_core.tiers.accounting import TierAccounting
from offload_core.tiers.calls.answer import answer
from offload_core.tiers.circuit_breaker import Call
from offload_core.tiers.health import TierHealth
from offload_core.tiers.storage import TierStorage

_MAX_RUNNING_LOOKUPS = 16
_MAX_OVERDUE_LOOKUPS = 4


class TierLookups:
    """Looks objects up. For the I/O loop.

    Args:
        on_error: gets the error of a call, with its keys.
    """

    def __init__(
        self,
        storage: TierStorage,
        health: TierHealth,
        accounting: TierAccounting,
        on_error: Callable[[Call, Sequence[ObjectKey], Exception], None],
    ) -> None:
        self._storage = storage
        self._health = health
        self._accounting = accounting
        self._on_error = on_error
        self._running = 0
        self._overdue: set[Call] = set()

    async def lookup(self, keys: Sequence[ObjectKey], within_seconds: float) -> list[bool] | None:
        """Return the answers of :meth:`ask`, and count the hits and misses; see :meth:`Tier.ask`."""
        present = await self.ask(keys, within_seconds)
        if present is not None:
            self._accounting.lookup_answered(present)
        return present

    async def ask(self, keys: Sequence[ObjectKey], within_seconds: float) -> list[bool] | None:
        """Return, per key, whether the object is there; ``None`` if the call failed or was refused."""
        max_overdue = _MAX_OVERDUE_LOOKUPS + self._storage.stuck_threads  # stuck threads have been replaced
        hangs = len(self._overdue) >= max_overdue
        if hangs or self._running >= _MAX_RUNNING_LOOKUPS:
            self._accounting.lookup_failed()
            if hangs:  # another call would time out as well
                self._health.timed_out("lookup", keys[0] if keys else None)
            return None
        call = self._health.begin("lookup")
        if call is None:
            return None
        timer = asyncio.get_running_loop().call_later(within_seconds, self._timed_out, call, keys)
        self._running += 1
        started = time.monotonic()
        try:
            present = await answer(self._storage.contains(keys))
        except Exception as error:
            self._on_error(call, keys, error)
            self._accounting.lookup_failed()
            return None
        finally:
            self._health.ended(call)
            self._accounting.lookup_ended(time.monotonic() - started)
            self._running -= 1
            timer.cancel()
            self._overdue.discard(call)
        self._health.succeeded(call)
        return present

    def _timed_out(self, call: Call, keys: Sequence[ObjectKey]) -> None:
        self._overdue.add(call)
        self._accounting.lookup_timed_out()
        self._health.timed_out("lookup", keys[0] if keys else None)
