"""Changes of the account that wait for the next transaction, so that no load waits for the database."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from offload_core.api import ObjectKey


@dataclass
class PendingChanges:
    """The changes that one transaction writes."""

    used_ns: dict[ObjectKey, int] = field(default_factory=dict)
    """Times of use, by object."""
    reservations: list[int] = field(default_factory=list)
    """Reservations to remove."""
    stored_ns: dict[ObjectKey, int] = field(default_factory=dict)
    """Times of store, by object."""
    removed: set[ObjectKey] = field(default_factory=set)
    """Objects that were removed from the disk."""

    def __bool__(self) -> bool:
        return bool(self.used_ns or self.reservations or self.stored_ns or self.removed)


class WriteBehind:
    """Collects changes, from any thread. Times are in nanoseconds, and no two are equal."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending = PendingChanges()
        self._last_ns = 0

    def next_time_ns(self) -> int:
        """Return the time, later than any returned before."""
        with self._lock:
            return self._next_time_ns()

    def record_use(self, keys: Iterable[ObjectKey]) -> None:
        """Record a use of objects, in this order."""
        with self._lock:
            for key in keys:
                self._pending.used_ns.pop(key, None)
                self._pending.used_ns[key] = self._next_time_ns()

    def record_stored(self, stored: Iterable[ObjectKey], reservations: Iterable[int]) -> None:
        """Record objects that are on the disk now, and reservations that have ended."""
        with self._lock:
            self._pending.reservations += reservations
            for key in stored:
                self._pending.used_ns.pop(key, None)  # a use of the object before this one
                self._pending.stored_ns[key] = self._next_time_ns()

    def record_removed(self, keys: Iterable[ObjectKey]) -> None:
        """Record objects that were removed from the disk but not from the account."""
        with self._lock:
            for key in keys:
                self._pending.stored_ns.pop(key, None)
                self._pending.removed.add(key)

    def take(self) -> PendingChanges:
        """Return the pending changes and start with none."""
        with self._lock:
            taken, self._pending = self._pending, PendingChanges()
            return taken

    def put_back(self, taken: PendingChanges) -> None:
        """Put changes back after their transaction failed; newer ones win."""
        with self._lock:
            newer = self._pending
            self._pending = PendingChanges(
                taken.used_ns | newer.used_ns,
                taken.reservations + newer.reservations,
                {key: at for key, at in (taken.stored_ns | newer.stored_ns).items() if key not in newer.removed},
                taken.removed | newer.removed,
            )

    def __bool__(self) -> bool:
        with self._lock:
            return bool(self._pending)

    def _next_time_ns(self) -> int:
        self._last_ns = max(self._last_ns + 1, time.time_ns())
        return self._last_ns
