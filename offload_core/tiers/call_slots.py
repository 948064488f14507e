"""Slots for calls on one tier, which calls that are past their deadlines do not keep for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class CallSlots:
    """Bounds how many calls run at once. For one event loop.

    A call that is past its deadline hangs, and may never end: another gets its slot, up to ``spare_slots`` times. So
    what never comes back does not keep a medium that is well again from being used, and is bounded nevertheless.

    Args:
        slots: calls at once that are within their deadlines.
        spare_slots: calls past their deadlines whose slots others get; further ones keep theirs.
    """

    def __init__(self, slots: int, spare_slots: int) -> None:
        self._free = asyncio.Semaphore(slots)
        self._spare_slots = spare_slots
        self._late: list[object] = []  # calls past their deadlines that keep their slots
        self._replaced: set[object] = set()  # calls past their deadlines whose slots others got

    @asynccontextmanager
    async def held(self, deadline: float) -> AsyncIterator[None]:
        """Wait for a slot and hold it for the block. Cancelled while it waits, it holds nothing.

        Args:
            deadline: when the call in the block is late, by the monotonic clock.
        """
        await self._free.acquire()
        call = object()
        seconds = max(0.0, deadline - time.monotonic())
        timer = asyncio.get_running_loop().call_later(seconds, self._is_late, call)
        try:
            yield
        finally:
            timer.cancel()
            if call in self._replaced:
                self._replaced.discard(call)
            else:
                if call in self._late:
                    self._late.remove(call)
                self._free.release()
            self._replace_late()

    def _is_late(self, call: object) -> None:
        self._late.append(call)
        self._replace_late()

    def _replace_late(self) -> None:
        while self._late and len(self._replaced) < self._spare_slots:
            self._replaced.add(self._late.pop(0))
            self._free.release()
