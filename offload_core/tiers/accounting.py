"""A tier's accounting: outcomes of calls become counters and events."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from offload_core.api import events
from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.plugins.observers import EventSink
from offload_core.runtime.metrics import Counters
from offload_core.tiers.calls.lent_objects import WantedObject
from offload_core.tiers.object_io import LoadEnd
from offload_core.tiers.staged_object import StagedObject
from offload_core.tiers.storage import StoreEnd

_MAX_UNREAD = 1 << 18
"""Stored objects that a tier remembers until they are loaded; each takes about 100 bytes."""


class TierAccounting:
    """Counts one tier's outcomes, and sends their events to observers. :class:`TierHealth` counts failures itself.

    Args:
        compresses: count bytes and objects of compression as well.
        observers: ``None`` when there are none.
    """

    def __init__(self, tier: str, counters: Counters, compresses: bool, observers: EventSink | None) -> None:
        self._tier = tier
        self._counters = counters
        self._compresses = compresses
        self._observers = observers
        self._is_open = False
        self._unread: OrderedDict[int, int] = OrderedDict()
        """Bytes of the objects that this process stored and never loaded, by the hash of the key, the oldest first."""
        self._unread_lock = threading.Lock()

    def opened(self, seconds: float) -> None:
        """Record that the backend is open, after ``seconds``."""
        self._is_open = True
        self._emit(events.TierOpened(self._tier, seconds))

    def closed(self) -> None:
        """Record that the backend is closed, or its ``close`` has raised. A tier that was never open has no event."""
        if self._is_open:
            self._is_open = False
            self._emit(events.TierClosed(self._tier))

    def stuck_threads_changed(self, change: int) -> None:
        """Count ``change`` more stuck threads; fewer if negative."""
        self._add("stuck_threads", change)

    def storage_ended(self) -> None:
        """Count an end of the storage's process."""
        self._add("io_process_ends")

    def lookup_ended(self, seconds: float) -> None:
        """Count a call that looked objects up, whether it failed or not."""
        self._counters.observe("lookup_seconds", self._tier, seconds)

    def lookup_answered(self, present: Sequence[bool]) -> None:
        """Count a lookup with one answer per object."""
        hits = present.count(True)
        self._add("lookup_hits", hits)
        self._add("lookup_misses", len(present) - hits)

    def lookup_failed(self) -> None:
        """Count a lookup that raised, or was refused because too many lookups were running."""
        self._add("lookup_failures")

    def lookup_timed_out(self) -> None:
        """Count a lookup that has missed its deadline."""
        self._add("lookup_timeouts")
        self._add("lookup_failures")

    def loaded(self, objects: Sequence[StagedObject | WantedObject], end: LoadEnd, seconds: float) -> None:
        """Count a batch of loads that has ended, after ``seconds``."""
        outcomes = end.outcomes
        hits, missing = outcomes.count(LoadOutcome.HIT), outcomes.count(LoadOutcome.MISS)
        pairs = list(zip(objects, outcomes, strict=True))
        self._counters.observe("load_seconds", self._tier, seconds)
        self._take_unread(staged.key for staged in objects)
        corrupt = tuple(staged.key for staged, outcome in pairs if outcome is LoadOutcome.CORRUPT)
        if self._compresses:
            raw = sum(staged.nbytes for staged, outcome in pairs if outcome is LoadOutcome.HIT)
            self._add("load_raw_bytes", raw)
        self._add("load_missing", missing)
        self._add("load_hits", hits)
        self._add("load_bytes", end.stored_bytes)
        self._add("load_read_twice", end.read_twice)
        self._emit(events.LoadsEnded(self._tier, hits, missing, len(corrupt), 0, end.stored_bytes, seconds))
        if corrupt:
            self.damaged(corrupt)

    def damaged(self, keys: tuple[ObjectKey, ...]) -> None:
        """Count and report objects that are damaged."""
        self._add("load_corrupt", len(keys))
        self._emit(events.ObjectsDamaged(self._tier, keys))

    def load_failed(self, objects: int, seconds: float) -> None:
        """Count a batch of ``objects`` whose load raised after ``seconds``."""
        self._counters.observe("load_seconds", self._tier, seconds)
        self._add("load_failures", objects)
        self._emit(events.LoadsEnded(self._tier, 0, 0, 0, objects, 0, seconds))

    def stored(self, objects: Sequence[StagedObject | WantedObject], ends: Sequence[StoreEnd], seconds: float) -> None:
        """Count a batch of stores that has ended.

        Args:
            ends: one per object.
            seconds: duration of the call.
        """
        outcomes = [end.outcome for end in ends]
        present, rejected = outcomes.count(StoreOutcome.ALREADY_PRESENT), outcomes.count(StoreOutcome.REJECTED)
        pairs = list(zip(objects, ends, strict=True))
        spare = sum(1 for staged, end in pairs if staged.spare and end.outcome is StoreOutcome.REJECTED)
        stored = [(staged, end) for staged, end in pairs if end.outcome is StoreOutcome.STORED]
        nbytes = sum(end.nbytes for _, end in stored)
        self._counters.observe("store_seconds", self._tier, seconds)
        self._add_unread((staged.key, end.nbytes) for staged, end in stored)
        if self._compresses:
            self._add("store_raw_bytes", sum(staged.nbytes for staged, _ in stored))
            self._add("store_uncompressed", sum(not end.compressed for _, end in stored))
        self._add("store_dropped", outcomes.count(None))
        self._add("stores", len(stored))
        self._add("store_bytes", nbytes)
        self._add("store_already_present", present)
        self._add("store_rejected", rejected - spare)
        self._add("spares_declined", spare)
        self._emit(events.StoresEnded(self._tier, len(stored), present, rejected, 0, nbytes, seconds))

    def store_failed(self, objects: int, seconds: float) -> None:
        """Count a batch of ``objects`` whose store raised after ``seconds``."""
        self._counters.observe("store_seconds", self._tier, seconds)
        self._add("store_failures", objects)
        self._emit(events.StoresEnded(self._tier, 0, 0, 0, objects, 0, seconds))

    def store_refused(self, objects: int) -> None:
        """Count a batch of ``objects`` that was dropped, since the tier is not used for now."""
        self._add("store_dropped", objects)

    def evicted(self, keys: Sequence[ObjectKey]) -> None:
        """Count and report objects that the backend evicted to make room."""
        self._add("evictions", len(keys))
        self.evicted_by_others(keys)
        if keys:
            self._emit(events.ObjectsEvicted(self._tier, tuple(keys)))

    def evicted_by_others(self, keys: Sequence[ObjectKey]) -> None:
        """Count objects that nobody has loaded, among those that the backend evicted for this or another process."""
        sizes = self._take_unread(keys)
        self._add("evictions_unread", len(sizes))
        self._add("evictions_unread_bytes", sum(sizes))

    def delete_failed(self, objects: int) -> None:
        """Count a batch of damaged ``objects`` whose deletion raised."""
        self._add("delete_failures", objects)

    def _add_unread(self, stored: Iterable[tuple[ObjectKey, int]]) -> None:
        """Remember stored objects until they are loaded or evicted; of too many, the oldest are forgotten."""
        with self._unread_lock:
            for key, nbytes in stored:
                self._unread[hash(key)] = nbytes
                self._unread.move_to_end(hash(key))
            while len(self._unread) > _MAX_UNREAD:
                self._unread.popitem(last=False)

    def _take_unread(self, keys: Iterable[ObjectKey]) -> list[int]:
        """Forget objects, and return the sizes of those that were stored and never loaded."""
        with self._unread_lock:
            sizes = [self._unread.pop(hash(key), None) for key in keys]
        return [size for size in sizes if size is not None]

    def _add(self, counter: str, amount: int = 1) -> None:
        self._counters.add(counter, self._tier, amount)

    def _emit(self, event: events.Event) -> None:
        if self._observers:
            self._observers.emit(event)
