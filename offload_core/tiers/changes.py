"""Changes of a medium that only this process sees, for the scheduler half's index of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from offload_core.api.keys import ObjectKey


class TierChange(NamedTuple):
    """An object has come to a tier or left it."""

    tier: str
    key: ObjectKey
    present: bool


class TierChanges:
    """Queue of one tier's changes, in the order in which they happened. Any thread may take them.

    Args:
        shared: the medium answers every process, so no change is kept.
    """

    def __init__(self, tier: str, shared: bool) -> None:
        self._tier = tier
        self._queue: deque[TierChange] | None = None if shared else deque()
        self._present: set[ObjectKey] = set()

    def add(self, keys: Iterable[ObjectKey], present: bool) -> None:
        """Add one change per object of ``keys``. Call it on the I/O loop."""
        if self._queue is None:
            return
        for key in keys:
            (self._present.add if present else self._present.discard)(key)
            self._queue.append(TierChange(self._tier, key, present))

    def lost(self) -> None:
        """Note that the medium has lost all objects. Call it on the I/O loop."""
        self.add(list(self._present), present=False)

    def take(self) -> list[TierChange]:
        """Return the changes since the last call."""
        taken: list[TierChange] = []
        while self._queue:
            taken.append(self._queue.popleft())
        return taken
