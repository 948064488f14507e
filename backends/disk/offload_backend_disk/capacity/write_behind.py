"""Changes of the account that wait for the next transaction, so that no load waits for the database."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from typing import NamedTuple

from offload_backend_disk.capacity.rows import Segment
from offload_core.api import ObjectKey

_MAX_RECENCY_CHANGES = 100_000
"""The oldest ones beyond it are lost, if the account cannot be written for long. They only order the eviction."""
CLOCK_TOLERANCE_NS = 1_000_000_000
"""If a clock is set back by less, the next times follow the last one by a nanosecond each."""


class Recency(Enum):
    """The changes that make an object the most recently used one."""

    USED = auto()
    TOUCHED = auto()
    """It is kept, but a touch is no use."""
    MADE_SPARE = auto()


class RecencyChange(NamedTuple):
    """A change of an object's place in the order of eviction, and its time in nanoseconds."""

    kind: Recency
    time_ns: int

    def after(self, earlier: RecencyChange | None) -> RecencyChange:
        """Return the one change that stands for an earlier one and this one."""
        if earlier is not None and earlier.kind is Recency.USED and self.kind is Recency.TOUCHED:
            return RecencyChange(Recency.USED, self.time_ns)
        return self


class StoredObject(NamedTuple):
    """The time at which an object was stored, in nanoseconds, and its segment."""

    time_ns: int
    segment: Segment


@dataclass
class PendingChanges:
    """The changes that one transaction writes."""

    recency: dict[ObjectKey, RecencyChange] = field(default_factory=dict)
    """Changes of the order of eviction, by object, the oldest first."""
    reservations: list[int] = field(default_factory=list)
    """Reservations to remove."""
    stored: dict[ObjectKey, StoredObject] = field(default_factory=dict)
    """Objects that were stored."""
    removed: set[ObjectKey] = field(default_factory=set)
    """Objects that were removed from the disk."""

    def __bool__(self) -> bool:
        return bool(self.recency or self.reservations or self.stored or self.removed)


class WriteBehind:
    """Collects changes, from any thread. Times are in nanoseconds, and increase until the clock is set back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending = PendingChanges()
        self._last_ns = 0

    def next_time_ns(self) -> int:
        """Return the time, later than any returned before unless the clock was set back."""
        with self._lock:
            return self._next_time_ns()

    def record_use(self, keys: Iterable[ObjectKey]) -> None:
        """Record a use of objects, in this order."""
        self.record((key, Recency.USED) for key in keys)

    def record(self, changes: Iterable[tuple[ObjectKey, Recency]]) -> None:
        """Record changes of the order of eviction, in this order."""
        with self._lock:
            for key, kind in changes:
                earlier = self._pending.recency.pop(key, None)
                self._pending.recency[key] = RecencyChange(kind, self._next_time_ns()).after(earlier)
            self._drop_oldest()

    def record_stored(self, stored: Iterable[tuple[ObjectKey, Segment]], reservations: Iterable[int]) -> None:
        """Record objects that are on the disk now, and reservations that have ended."""
        with self._lock:
            self._pending.reservations += reservations
            for key, segment in stored:
                self._pending.recency.pop(key, None)  # of the object before this one
                self._pending.stored[key] = StoredObject(self._next_time_ns(), segment)

    def record_removed(self, keys: Iterable[ObjectKey]) -> None:
        """Record objects that were removed from the disk but not from the account."""
        with self._lock:
            for key in keys:
                self._pending.stored.pop(key, None)
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
            changed = {key: change.after(taken.recency.pop(key, None)) for key, change in newer.recency.items()}
            self._pending = PendingChanges(
                taken.recency | changed,
                taken.reservations + newer.reservations,
                {key: one for key, one in (taken.stored | newer.stored).items() if key not in newer.removed},
                taken.removed | newer.removed,
            )
            self._drop_oldest()

    def __bool__(self) -> bool:
        with self._lock:
            return bool(self._pending)

    def _drop_oldest(self) -> None:
        recency = self._pending.recency
        excess = len(recency) - _MAX_RECENCY_CHANGES
        if excess > 0:
            for key in list(islice(recency, excess)):
                del recency[key]

    def _next_time_ns(self) -> int:
        now_ns = time.time_ns()
        if self._last_ns > now_ns + CLOCK_TOLERANCE_NS:  # the clock was set back
            self._last_ns = now_ns
        self._last_ns = max(self._last_ns + 1, now_ns)
        return self._last_ns
