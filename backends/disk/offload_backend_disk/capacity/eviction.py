"""The order of eviction, and its extent.

``lru`` evicts the least recently used object first.

``slru`` is segmented LRU. The source is Karedla, Love and Wherry, "Caching strategies to improve disk system
performance", IEEE Computer 27(3), 1994. An object is protected from its first use after the store on. Unprotected
objects are evicted first. When the protected objects exceed their part of the capacity, the least recently used of
them become unprotected again, as if they were just used. So one pass over many prompts that never come again does not
evict the objects that many requests share.

Both evict spare objects before all others. A spare object that is used is spare no longer.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from offload_backend_disk.capacity.pins import Pins
from offload_backend_disk.capacity.rows import Rows, Totals
from offload_backend_disk.capacity.write_behind import Recency, RecencyChange
from offload_backend_disk.folder.layout import Layout
from offload_core.api import ObjectKey, TierLogger

Policy = Literal["lru", "slru"]

PROTECTED_SHARE = 0.8
"""The largest part of the capacity that ``slru`` protects."""

_EXTRA_PER_STEP = 64
_MOST_PER_STEP = 256
_MOST_FAILURES = 64
_ERRNOS_OF_ONE_FILE = frozenset({errno.EPERM, errno.EACCES, errno.EBUSY, errno.EIO, errno.EUCLEAN})
"""Errors of a removal that may concern one file or folder only: an immutable one, a mount point, a bad sector."""
_ERRNOS_OF_DISK = frozenset({errno.EIO, errno.EUCLEAN})
_MIN_DISK_FAILURES = 3
"""So many of these errors without one removal are a failure of the disk."""


@dataclass(frozen=True)
class Limits:
    """The limits of a folder.

    Args:
        capacity_bytes: limit on all objects and reservations.
        high_watermark: an eviction begins when this part of the capacity would be exceeded.
        low_watermark: it continues until at most this part is in use.
        keep_free_bytes: bytes to leave free on the file system.
        policy: the order of eviction.
    """

    capacity_bytes: int
    high_watermark: float = 1.0
    low_watermark: float = 0.95
    keep_free_bytes: int = 0
    policy: Policy = "lru"


class Evictor:
    """Evicts objects in the transactions of an account, one transaction at a time.

    Args:
        free_bytes: returns the free bytes of the file system.
        next_time_ns: returns the time in nanoseconds, later than any returned before.
    """

    def __init__(
        self,
        layout: Layout,
        pins: Pins,
        limits: Limits,
        free_bytes: Callable[[], int],
        next_time_ns: Callable[[], int],
        log: TierLogger,
    ) -> None:
        self._layout = layout
        self._pins = pins
        self._limits = limits
        self._free_bytes = free_bytes
        self._next_time_ns = next_time_ns
        self._log = log
        self._is_above_low_watermark = False  # and an eviction has begun
        self._has_warned = False

    def record(self, rows: Rows, changes: Mapping[ObjectKey, RecencyChange]) -> None:
        """Record changes of the order of eviction."""
        segmented = self._limits.policy == "slru"
        rows.record_use(_times_ns(changes, Recency.USED), protect=segmented)
        rows.keep(_times_ns(changes, Recency.TOUCHED))
        rows.make_spare(_times_ns(changes, Recency.MADE_SPARE))
        if segmented:
            excess = rows.totals().protected - int(PROTECTED_SHARE * self._limits.capacity_bytes)
            rows.demote(excess, self._next_time_ns)

    def evict_excess(self, rows: Rows, nbytes: int) -> bool:
        """If far more is used than the limits permit, evict some of it; return whether the rest is for later calls.

        A lowered capacity needs this. One long eviction would keep all processes waiting. If ``nbytes`` could not even
        fit without any object, nothing is evicted: something else may have filled the disk.
        """
        totals = rows.totals()
        excess = self._missing_bytes(totals, 0) if totals.scanned else 0
        if excess + nbytes > totals.objects:
            return False
        victims = self._victims(rows, excess, _MOST_PER_STEP)
        if len(victims) < _MOST_PER_STEP or sum(size for _, size in victims) >= excess:
            return False  # evict_for can do it at once
        self._is_above_low_watermark = True
        self._evict_once(rows, victims)
        return True

    def evict_for(self, rows: Rows, nbytes: int) -> bool:
        """Evict objects until ``nbytes`` more fit; return whether they do. If they cannot fit, nothing is evicted.

        All processes wait for this one meanwhile. So an eviction down to the low watermark takes several steps, one
        with each request.

        Raises:
            OSError: the disk has failed, here and in :meth:`evict_excess`.
        """
        totals, limits = rows.totals(), self._limits
        if not totals.scanned:
            return False
        if totals.used + nbytes > limits.high_watermark * limits.capacity_bytes:
            self._is_above_low_watermark = True
        missing = self._missing_bytes(totals, nbytes)
        if missing > totals.objects or not self._evict_at_least(rows, missing):
            return False
        if self._is_above_low_watermark:
            target = min(int(limits.low_watermark * limits.capacity_bytes), limits.capacity_bytes - nbytes)
            self._is_above_low_watermark = self._evict_step(rows, rows.totals().used - target)
        return True

    def fits_freely(self, rows: Rows, nbytes: int) -> bool:
        """Return whether ``nbytes`` more fit below the low watermark without an eviction.

        The bytes up to the high watermark are for kept objects. Spare ones there would bring on the next eviction,
        which evicts them first. Each eviction would then make room for others.
        """
        totals, limits = rows.totals(), self._limits
        is_below = totals.used + nbytes <= limits.low_watermark * limits.capacity_bytes
        return totals.scanned and is_below and self._missing_bytes(totals, nbytes) <= 0

    def _missing_bytes(self, totals: Totals, nbytes: int) -> int:
        missing = totals.used + nbytes - self._limits.capacity_bytes
        if self._limits.keep_free_bytes:
            # Reserved bytes may not be on the disk yet.
            free_bytes = self._free_bytes() - totals.reserved
            missing = max(missing, self._limits.keep_free_bytes + nbytes - free_bytes)
        return missing

    def _evict_at_least(self, rows: Rows, nbytes: int) -> bool:
        kept: dict[ObjectKey, OSError] = {}
        missing = nbytes
        while missing > 0 and len(kept) <= _MOST_FAILURES:
            victims = self._victims(rows, missing, kept=kept)
            if sum(size for _, size in victims) < missing:
                break
            missing -= self._evict(rows, victims, kept)
        if missing == nbytes:
            _raise_if_disk_fails(kept)
        return missing <= 0

    def _evict_step(self, rows: Rows, nbytes: int) -> bool:
        """Evict some of ``nbytes``; return whether more remains to evict."""
        victims = self._victims(rows, nbytes, _EXTRA_PER_STEP)
        return bool(victims) and self._evict_once(rows, victims) < nbytes

    def _evict_once(self, rows: Rows, victims: Iterable[tuple[ObjectKey, int]]) -> int:
        kept: dict[ObjectKey, OSError] = {}
        evicted_bytes = self._evict(rows, victims, kept)
        if not evicted_bytes:
            _raise_if_disk_fails(kept)
        return evicted_bytes

    def _victims(
        self, rows: Rows, nbytes: int, most: int | None = None, kept: Container[ObjectKey] = ()
    ) -> list[tuple[ObjectKey, int]]:
        """Return the next unpinned objects to evict, of ``nbytes`` bytes in all if there are so many.

        Args:
            kept: objects that could not be removed.
        """
        found: list[tuple[ObjectKey, int]] = []
        if nbytes > 0:
            for key, size in rows.in_eviction_order():
                if key not in kept and self._pins.is_unpinned(key):
                    found.append((key, size))
                    nbytes -= size
                if nbytes <= 0 or len(found) == most:
                    break
        return found

    def _evict(self, rows: Rows, victims: Iterable[tuple[ObjectKey, int]], kept: dict[ObjectKey, OSError]) -> int:
        """Evict the victims that are still unpinned; return their bytes.

        Args:
            kept: receives the victims that could not be removed, each with the reason. They count as just used, so
                that all processes try others first.
        """
        evicted_bytes = 0
        for key, size in victims:
            with self._pins.keep_unpinned(key) as unpinned:
                if not unpinned:
                    continue
                try:
                    self._layout.unlink(key)
                except OSError as error:
                    self._raise_unless_of_one_file(error)
                    kept[key] = error
                else:
                    rows.removed_files.append(key)
                    evicted_bytes += size
        rows.remove_objects(rows.removed_files)
        rows.record_use(((key, self._next_time_ns()) for key in kept), protect=False)
        return evicted_bytes

    def _raise_unless_of_one_file(self, error: OSError) -> None:
        """Raise the error unless it may concern one file only; the first such error is logged."""
        if error.errno not in _ERRNOS_OF_ONE_FILE:
            raise error
        if not self._has_warned:
            self._has_warned = True
            self._log.warning(
                "%s: an object cannot be evicted, so others are evicted in its place: %s; make its file removable, "
                "or remove it (only the first one is logged)",
                self._layout.root,
                error,
            )


def _raise_if_disk_fails(errors: Mapping[ObjectKey, OSError]) -> None:
    """Raise the last error of removals if they mean that the disk has failed, given that none succeeded."""
    of_disk = [error for error in errors.values() if error.errno in _ERRNOS_OF_DISK]
    if len(of_disk) >= _MIN_DISK_FAILURES:
        raise of_disk[-1]


def _times_ns(changes: Mapping[ObjectKey, RecencyChange], kind: Recency) -> Iterator[tuple[ObjectKey, int]]:
    return ((key, change.time_ns) for key, change in changes.items() if change.kind is kind)
