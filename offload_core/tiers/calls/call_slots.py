"""Slots that bound the running calls on one tier; overdue calls lose their slots."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class CallSlots:
    """Bounds how many calls run at once. For one event loop.

    A call past its deadline may never end. Another call gets its slot, for up to ``spare_slots`` overdue calls at once.
    So a medium that has recovered can be used although old calls hang, and the number of running calls stays bounded.

    Args:
        slots: calls within their deadlines at once.
        spare_slots: overdue calls whose slots go to other calls; further overdue calls keep their slots.
    """

    def __init__(self, slots: int, spare_slots: int) -> None:
        self.slots = slots
        self.max_calls = slots + spare_slots
        """Maximum number of running calls, overdue ones included."""
        self._free = asyncio.Semaphore(slots)
        self._spare_slots = spare_slots
        self._running = 0
        self._overdue: list[object] = []  # calls past their deadlines that keep their slots
        self._replaced: set[object] = set()  # calls past their deadlines whose slots went to others

    @property
    def free(self) -> int:
        """Number of calls that would not wait for a slot."""
        return max(0, self.slots - self._running + len(self._replaced))

    @asynccontextmanager
    async def held(self, deadline: float) -> AsyncIterator[None]:
        """Wait for a slot and hold it for the block. If cancelled during the wait, it holds no slot.

        Args:
            deadline: of the call in the block, by the monotonic clock.
        """
        await self._free.acquire()
        self._running += 1
        call = object()
        seconds = max(0.0, deadline - time.monotonic())
        timer = asyncio.get_running_loop().call_later(seconds, self._deadline_passed, call)
        try:
            yield
        finally:
            timer.cancel()
            self._running -= 1
            if call in self._replaced:
                self._replaced.discard(call)
            else:
                if call in self._overdue:
                    self._overdue.remove(call)
                self._free.release()
            self._release_overdue_slots()

    def _deadline_passed(self, call: object) -> None:
        self._overdue.append(call)
        self._release_overdue_slots()

    def _release_overdue_slots(self) -> None:
        while self._overdue and len(self._replaced) < self._spare_slots:
            self._replaced.add(self._overdue.pop(0))
            self._free.release()
