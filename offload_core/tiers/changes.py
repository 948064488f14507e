"""Changes of a medium that only this process sees, for the scheduler half's index of it."""

from __future__ import annotations

import threading
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
    """Queue of one tier's changes, in the order in which they happened. Thread-safe.

    Args:
        shared: the medium answers every process, so no change is kept.
    """

    def __init__(self, tier: str, shared: bool) -> None:
        self._tier = tier
        self._queue: deque[TierChange] | None = None if shared else deque()
        self._present: set[ObjectKey] = set()
        self._lock = threading.Lock()

    def add(self, keys: Iterable[ObjectKey], present: bool) -> None:
        """Add one change per object of ``keys``."""
        if self._queue is not None:
            with self._lock:
                self._add(self._queue, keys, present)

    def remove(self, keys: Iterable[ObjectKey]) -> None:
        """Add a change per object that this process has seen, and that another process has removed."""
        if self._queue is not None:
            with self._lock:
                self._add(self._queue, [key for key in keys if key in self._present], present=False)

    def lost(self) -> None:
        """Note that the medium has lost all objects."""
        if self._queue is not None:
            with self._lock:
                self._add(self._queue, list(self._present), present=False)

    def take(self) -> list[TierChange]:
        """Return the changes since the last call."""
        taken: list[TierChange] = []
        while self._queue:
            taken.append(self._queue.popleft())
        return taken

    def _add(self, queue: deque[TierChange], keys: Iterable[ObjectKey], present: bool) -> None:
        for key in keys:
            (self._present.add if present else self._present.discard)(key)
            queue.append(TierChange(self._tier, key, present))
