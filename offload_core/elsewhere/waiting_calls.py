"""Lookups, loads and stores for another system's own I/O threads, which wait for each result.

The deadlines of the tiers bound every wait. A late call cannot reach the other system's memory: only the thread of
:class:`~offload_core.elsewhere.host_store.HostStore` copies, and only before the end of a job.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from offload_core.api.keys import ObjectKey
from offload_core.config.model import OffloadConfig
from offload_core.elsewhere.host_copier import PlaceParts
from offload_core.elsewhere.host_store import HostStore
from offload_core.elsewhere.jobs.host_jobs import EndedJob, PlacedObject
from offload_core.elsewhere.stored_keys import StoredKeys

_FOUND_KEYS = 262_144
"""Number of found objects whose tier is remembered until their load."""
_STORED_KEYS = 1_000_000
"""Number of stored objects that :meth:`WaitingCalls.clear` knows."""
_DELETE_OBJECTS = 256
"""Maximum number of objects in one deletion."""
_ANSWER_SECONDS = 0.1
"""Time for an answer to come back after the deadline of a lookup."""


class Place(NamedTuple):
    """An object, and the memory that it is stored from or loaded into."""

    key: ObjectKey
    parts: PlaceParts

    @property
    def nbytes(self) -> int:
        """The bytes of all parts."""
        return sum(map(len, self.parts))


class _FoundTiers:
    """The tiers in which lookups have found objects. Thread-safe."""

    def __init__(self) -> None:
        self._tiers: OrderedDict[ObjectKey, str] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, found: Iterable[tuple[ObjectKey, str | None]]) -> None:
        """Note the tiers of objects."""
        with self._lock:
            for key, tier in found:
                if tier is not None:
                    self._tiers[key] = tier
            while len(self._tiers) > _FOUND_KEYS:
                self._tiers.popitem(last=False)

    def take(self, keys: Sequence[ObjectKey]) -> list[str | None]:
        """Return the tiers of objects, and forget them: after a failed load, the next one asks again."""
        with self._lock:
            return [self._tiers.pop(key, None) for key in keys]

    def clear(self) -> None:
        """Forget all tiers."""
        with self._lock:
            self._tiers.clear()


class WaitingCalls:
    """The tiers behind calls that return when their result is there. All methods are for any thread.

    Args:
        config: the tiers.
        name: a name of the other system that is unique on this host while it runs.

    Raises:
        ConfigError: a tier cannot be opened.
    """

    def __init__(self, config: OffloadConfig, name: str) -> None:
        self._numbers = itertools.count()
        self._places: dict[int, PlaceParts] = {}
        self._results: dict[int, Future[frozenset[ObjectKey]]] = {}
        self._found = _FoundTiers()
        self._stored: StoredKeys[ObjectKey] = StoredKeys(_STORED_KEYS)
        self._is_closed = False
        self.store = HostStore(config, name, {}, self._places.__getitem__, self._job_ended)
        """The store, which moves the objects."""
        self.lookup_seconds = max(tier.limits.lookup_timeout_seconds for tier in self.store.tiers)
        """The longest wait for one lookup."""
        self._delete_seconds = max(tier.limits.store_timeout_seconds for tier in self.store.tiers)

    def find(self, keys: Sequence[ObjectKey], until: float | None = None) -> list[bool]:
        """Return which objects a tier has. A tier without an answer at its deadline has none.

        Args:
            until: time of the monotonic clock at which all objects without an answer are absent.
        """
        tiers = self._tiers_of(keys, until)
        self._found.add(zip(keys, tiers, strict=True))
        return [tier is not None for tier in tiers]

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        """Note a use of objects. The first one of them goes first in an eviction."""
        if keys and not self._is_closed:
            self.store.touch(keys)

    def load(self, places: Sequence[Place]) -> list[bool]:
        """Load objects into their memory; returns which are loaded. The memory of the others is unchanged.

        An object that stands there twice is loaded into its first place only.
        """
        first = {place.key: index for index, place in reversed(list(enumerate(places)))}
        wanted = sorted(first.values())
        keys = [places[index].key for index in wanted]
        tiers = self._found.take(keys)
        if unknown := [key for key, tier in zip(keys, tiers, strict=True) if tier is None]:
            answers = iter(self._tiers_of(unknown))
            tiers = [next(answers) if tier is None else tier for tier in tiers]
        job, objects = self._begin([places[index] for index in wanted])
        self.store.load(job, objects, tiers)
        moved = self._end(job, objects)
        return [first[place.key] == index and place.key in moved for index, place in enumerate(places)]

    def save(self, places: Sequence[Place]) -> list[bool]:
        """Store objects; returns which a tier has now. Their memory must stay unchanged during the call."""
        job, objects = self._begin(places)
        self.store.store(job, objects)
        moved = self._end(job, objects)
        self._stored.add((place.key, place.nbytes) for place in places if place.key in moved)
        return [place.key in moved for place in places]

    def clear(self) -> bool:
        """Delete all objects that this process has stored; returns whether they are gone at the deadline of a store.

        A deletion that is still under way goes on.
        """
        self._found.clear()
        if self._is_closed:
            return False
        until = time.monotonic() + self._delete_seconds
        keys = [key for key, _ in self._stored.page(_STORED_KEYS, None, lambda key: key.path, lambda key: True)]
        parts = [keys[start : start + _DELETE_OBJECTS] for start in range(0, len(keys), _DELETE_OBJECTS)]
        deletions = [(part, self.store.delete(part)) for part in parts]
        is_clear = True
        for part, deletion in deletions:
            try:
                gone = deletion.result(max(0.0, until - time.monotonic()))
            except Exception:  # the deadline, or a defect of a backend, which is counted and logged
                gone = False
            if gone:
                self._stored.remove(part)
            is_clear = is_clear and gone
        return is_clear

    def close(self) -> None:
        """Wait for pending stores, at most ``shutdown_timeout_seconds``, and close the tiers. Idempotent."""
        self._is_closed = True
        self.store.close()

    def _tiers_of(self, keys: Sequence[ObjectKey], until: float | None = None) -> list[str | None]:
        if not keys or self._is_closed:
            return [None] * len(keys)
        latest = time.monotonic() + self.lookup_seconds + _ANSWER_SECONDS
        end = latest if until is None else min(until, latest)
        try:
            return self.store.locate(keys).result(max(0.0, end - time.monotonic()))
        except Exception:  # the deadline, or a store that is being closed
            return [None] * len(keys)

    def _begin(self, places: Sequence[Place]) -> tuple[int, list[PlacedObject]]:
        objects = []
        for place in places:
            number = next(self._numbers)
            self._places[number] = place.parts
            objects.append(PlacedObject(place.key, number, place.nbytes))
        job = next(self._numbers)
        self._results[job] = Future()
        return job, objects

    def _end(self, job: int, objects: Sequence[PlacedObject]) -> frozenset[ObjectKey]:
        """Wait for the end of a job: the deadlines of its tiers bound the wait."""
        moved = self._results[job].result()
        del self._results[job]
        for placed in objects:
            del self._places[placed.place]
        return moved

    def _job_ended(self, ended: EndedJob) -> None:
        self._results[ended.job_id].set_result(ended.moved)
