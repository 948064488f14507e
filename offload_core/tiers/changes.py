"""Changes of a medium: for the scheduler half's index of a medium that only this process sees, and for KV events."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import NamedTuple

from offload_core.api.keys import ObjectKey

_MAX_SHARED_CHANGES = 1 << 16
"""Changes of a shared medium that wait to be taken. The medium answers everyone, so the oldest may be lost."""

_MAX_RECENT_EVICTIONS = 1 << 14


class TierChange(NamedTuple):
    """An object has come to a tier or left it."""

    tier: str
    key: ObjectKey
    present: bool


class TierChanges:
    """Queue of one tier's changes, in the order in which they happened. Thread-safe.

    Args:
        shared: the medium answers every process, so no change is kept before :meth:`keep`.
    """

    def __init__(self, tier: str, shared: bool) -> None:
        self._tier = tier
        self._shared = shared
        self._queue: deque[TierChange] | None = None if shared else deque()
        self._present: set[ObjectKey] = set()
        self._evicted: OrderedDict[ObjectKey, float] = OrderedDict()
        """Recent evictions with the time of their report, the oldest first."""
        self._lock = threading.Lock()

    def keep(self) -> None:
        """Keep changes from now on, of a shared medium too."""
        if self._queue is None:
            self._queue = deque(maxlen=_MAX_SHARED_CHANGES)

    def found(self, keys: Iterable[ObjectKey]) -> None:
        """Add objects that a load has found. Of an unshared medium they are known, and may be evicted by now."""
        if self._shared:
            self.add(keys, present=True)

    def add(self, keys: Iterable[ObjectKey], present: bool) -> None:
        """Add one change per object of ``keys``."""
        if self._queue is not None:
            with self._lock:
                self._add(self._queue, keys, present)

    def stored(self, keys: Iterable[ObjectKey], since: float) -> None:
        """Add objects that a store has brought, except for those evicted since.

        A store of several objects may end after another store has evicted some of them.

        Args:
            since: begin of the store, by the monotonic clock in seconds.
        """
        if self._queue is not None:
            with self._lock:
                stays = [key for key in keys if self._evicted.get(key, since) <= since]
                self._add(self._queue, stays, present=True)

    def evicted(self, keys: Iterable[ObjectKey], *, by_others: bool = False) -> None:
        """Add a change per evicted object.

        Args:
            by_others: another process has evicted them, perhaps some that this process has never seen.
        """
        if self._queue is not None:
            now = time.monotonic()
            with self._lock:
                for key in keys:
                    self._evicted[key] = now
                    self._evicted.move_to_end(key)
                    if not by_others or self._shared or key in self._present:
                        self._add(self._queue, [key], present=False)
                while len(self._evicted) > _MAX_RECENT_EVICTIONS:
                    self._evicted.popitem(last=False)

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
            if not self._shared:  # others fill a shared medium without limit
                (self._present.add if present else self._present.discard)(key)
            queue.append(TierChange(self._tier, key, present))
