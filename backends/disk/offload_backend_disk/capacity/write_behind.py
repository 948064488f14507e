"""What is still to be written down in the account: nobody who loads waits for a transaction."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from offload_core.api import ObjectKey


@dataclass
class Batch:
    """What one transaction writes down."""

    touched: dict[ObjectKey, int] = field(default_factory=dict)
    """When objects were used."""
    ended: list[int] = field(default_factory=list)
    """Reservations that have ended."""
    written: dict[ObjectKey, int] = field(default_factory=dict)
    """Objects that have come to the disk, and when."""
    gone: set[ObjectKey] = field(default_factory=set)
    """Objects that have left it."""

    def __bool__(self) -> bool:
        return bool(self.touched or self.ended or self.written or self.gone)


class Notes:
    """Collects a :class:`Batch`, from any thread. Times are in nanoseconds, and no two are the same."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batch = Batch()
        self._last_ns = 0

    def now(self) -> int:
        """Return the time, later than any returned before."""
        with self._lock:
            return self._now()

    def touch(self, keys: Iterable[ObjectKey]) -> None:
        """Note that objects were used, in this order."""
        with self._lock:
            for key in keys:
                self._batch.touched.pop(key, None)
                self._batch.touched[key] = self._now()

    def settle(self, written: Iterable[ObjectKey], ended: Iterable[int]) -> None:
        """Note objects that are on the disk now, and reservations that have ended."""
        with self._lock:
            self._batch.ended += ended
            for key in written:
                self._batch.touched.pop(key, None)  # that was one before it
                self._batch.written[key] = self._now()

    def lose(self, keys: Iterable[ObjectKey]) -> None:
        """Note objects that were removed, for which the account has not been changed."""
        with self._lock:
            for key in keys:
                self._batch.written.pop(key, None)
                self._batch.gone.add(key)

    def take(self) -> Batch:
        """Return what there is, and begin anew."""
        with self._lock:
            taken, self._batch = self._batch, Batch()
            return taken

    def put_back(self, batch: Batch) -> None:
        """Put back what could not be written down."""
        with self._lock:
            late = self._batch
            self._batch = Batch(
                batch.touched | late.touched,
                batch.ended + late.ended,
                {key: at for key, at in (batch.written | late.written).items() if key not in late.gone},
                batch.gone | late.gone,
            )

    def __bool__(self) -> bool:
        with self._lock:
            return bool(self._batch)

    def _now(self) -> int:
        self._last_ns = max(self._last_ns + 1, time.time_ns())
        return self._last_ns
