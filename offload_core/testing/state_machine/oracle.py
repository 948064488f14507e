"""The oracle: the contents that each key of a medium may have, tracked by brute force.

Most keys allow exactly one content, or exactly "absent". A key allows several where the contract leaves it open:

- two different contents were stored under one key; either may stay (C4);
- an operation was cancelled;
- a bounded medium may have evicted the object;
- the medium evicts by itself, so that every object may be absent at any time.

A later read narrows them down again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from offload_core.api.backend import LoadOutcome, StoredObject, StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.testing.strategies import Content

_FEWEST_READS = 20
"""Fewest reads of stored objects from which :class:`Reads` judges."""

OVERHEAD_BYTES = 4096
"""Most bytes that a bounded medium may charge per object beyond the object's own bytes, by this oracle."""


class ContractError(AssertionError):
    """A backend has broken a clause; the message begins with its number."""


@dataclass
class StoreEvent:
    """One object of a store: the content to write and the answer; ``None`` if cancelled before an answer."""

    key: ObjectKey
    content: Content
    outcome: StoreOutcome | None = None
    reserved: bool = False
    spare: bool = False


@dataclass
class LoadEvent:
    """One object of a load: the buffer before and after, and the answer; ``None`` if cancelled before an answer."""

    key: ObjectKey
    before: bytes
    after: bytes = b""
    outcome: LoadOutcome | None = None
    prepared: bool | None = None


@dataclass
class LookupEvent:
    """One answer of ``contains``."""

    key: ObjectKey
    present: bool


@dataclass
class DeleteEvent:
    """One key of a delete."""

    key: ObjectKey
    cancelled: bool = False


Event = StoreEvent | LoadEvent | LookupEvent | DeleteEvent


@dataclass
class Reads:
    """The reads of objects that were stored and not deleted, in all examples, on a medium that evicts by itself."""

    stored: int = 0
    found: int = 0

    def check(self) -> None:
        """Check that the medium keeps at least half of the objects (C5).

        Raises:
            ContractError: most objects were absent.
        """
        _demand(
            self.stored < _FEWEST_READS or 2 * self.found >= self.stored,
            "C5",
            f"of {self.stored} lookups and loads of stored objects, {self.found} found the object; the medium evicts "
            "by itself, but a few small objects must fit",
        )


class Oracle:
    """The contents that each key may have.

    Args:
        capacity_bytes: the limit of a bounded medium, else ``None``.
        reads: counts the reads of stored objects on a medium that evicts by itself, else ``None``.
    """

    def __init__(self, capacity_bytes: int | None, reads: Reads | None = None) -> None:
        self._capacity_bytes = capacity_bytes
        self._reads = reads
        self._requested_bytes = 0
        self._contents: dict[ObjectKey, frozenset[Content | None]] = {}
        self.pins: Counter[ObjectKey] = Counter()
        self.reserved: list[dict[ObjectKey, int]] = []
        """Bytes per key that each held store reservation has reserved."""

    @property
    def keys(self) -> list[ObjectKey]:
        """Every key that was ever stored."""
        return list(self._contents)

    @property
    def may_evict(self) -> bool:
        """True if stores have asked for so many bytes that a bounded medium may evict and reject."""
        return self._capacity_bytes is not None and 2 * self._requested_bytes > self._capacity_bytes

    def allowed(self, key: ObjectKey) -> frozenset[Content | None]:
        """Return the contents that ``key`` may have now; ``None`` stands for absent."""
        expected = self._expected(key)
        return expected if self._reads is None else expected | {None}

    def likely_size(self, key: ObjectKey) -> int:
        """Return a size that the stored object may have; 17 bytes if no object can be there."""
        return min((content.size_bytes for content in self.allowed(key) if content is not None), default=17)

    def request_capacity(self, sizes_bytes: Sequence[int], spare: Sequence[bool] = ()) -> None:
        """Take up a request for capacity: a bounded medium may evict unpinned objects for it.

        Args:
            sizes_bytes: the bytes of each object.
            spare: one flag per object, or nothing. Nothing is evicted for spare objects (C20).
        """
        self._requested_bytes += sum(size + OVERHEAD_BYTES for size in sizes_bytes)
        if self.may_evict and not (spare and all(spare)):
            self.everything_may_be_evicted()

    def everything_may_be_evicted(self) -> None:
        """Take up that the medium may have evicted every object that is not pinned."""
        for key in self._contents:
            if not self.pins[key]:
                self._contents[key] |= {None}

    def check_prepared_load(self, key: ObjectKey, present: bool, *, pins: bool, nbytes: int | None = None) -> None:
        """Check and take up the answer of ``prepare_load`` for ``key``.

        Args:
            key: the key.
            present: whether ``prepare_load`` found the object.
            pins: whether ``prepare_load`` pins a present object, as on a bounded medium (C9).
            nbytes: the size that ``prepare_load`` reported, or ``None`` (C19).

        Raises:
            ContractError: an object that must be there was not found, or the reported size is wrong.
        """
        allowed = self.allowed(key)
        sizes = sorted({content.size_bytes for content in allowed if content is not None})
        _demand(
            not present or nbytes is None or nbytes in sizes,
            "C19",
            f"prepare_load says that {key} has {nbytes} bytes; it should have {_words(sizes, 'not be there')}",
        )
        _demand(present or None in allowed, "C5", f"prepare_load({key}) finds nothing; it holds {_words(allowed)}")
        if present and pins:
            self._contents[key] = allowed - {None} or allowed
            self.pins[key] += 1

    def check_events(self, events: Sequence[Event], *, with_kept_stores: bool = False) -> None:
        """Check the answers of operations that ran together, and take up their changes.

        Args:
            with_kept_stores: whether the same call made room for objects that are not among the events.

        Raises:
            ContractError: no order of the operations explains an answer.
        """
        before = {event.key: self.allowed(event.key) for event in events}
        stores = {key: [e for e in events if isinstance(e, StoreEvent) and e.key == key] for key in before}
        deletes = {key: [e for e in events if isinstance(e, DeleteEvent) and e.key == key] for key in before}
        kept = with_kept_stores or any(isinstance(event, StoreEvent) and not event.spare for event in events)
        evicting = self.may_evict and kept
        for event in events:
            during = before[event.key] | {written.content for written in stores[event.key]}
            if deletes[event.key]:
                during |= {None}
            loss = "C9" if self.pins[event.key] else "C5"
            if isinstance(event, StoreEvent):
                self._check_store(event, before[event.key], stores[event.key])
            elif isinstance(event, LoadEvent):
                _check_load(event, during, loss)
                pinned = self._capacity_bytes is not None and event.prepared and not deletes[event.key]
                _demand(
                    not (pinned and event.outcome is LoadOutcome.MISS),
                    "C9",
                    f"loading {event.key}: MISS, though prepare_load found and pinned it just before",
                )
            elif isinstance(event, LookupEvent):
                _check_lookup(event, during, loss)
        for key in before:
            self._contents[key] = self._after(key, self._expected(key), stores[key], deletes[key], evicting=evicting)
        if not any(isinstance(event, StoreEvent | DeleteEvent) for event in events):  # nothing changed meanwhile
            for event in events:
                self._count_read(event)
                self._narrow(event)

    def check_listing(self, listed: Sequence[StoredObject], keys: Collection[ObjectKey]) -> None:
        """Check a listing of the medium against ``keys`` (C18).

        Raises:
            ContractError: an object is missing, listed twice, listed with a wrong size, or should not be there.
        """
        found = [entry for entry in listed if entry.key in keys]
        for key, count in Counter(entry.key for entry in found).items():
            _demand(count == 1, "C18", f"{key} is listed {count} times; once is right")
        for entry in found:
            sizes = sorted({content.size_bytes for content in self.allowed(entry.key) if content is not None})
            _demand(
                entry.nbytes in sizes,
                "C18",
                f"{entry.key} is listed with {entry.nbytes} bytes; it should have {_words(sizes, 'not be there')}",
            )
        there = {entry.key for entry in found}
        for key in keys:
            _demand(
                key in there or None in self.allowed(key),
                "C18",
                f"{key} is not listed; it holds {_words(self.allowed(key))}",
            )

    def check_capacity(self, present: Collection[ObjectKey]) -> None:
        """Check that stored objects and reservations together fit into a bounded medium (C11).

        Raises:
            ContractError: together they exceed the limit.
        """
        if self._capacity_bytes is None:
            return
        sizes = {key: self.likely_size(key) for key in present}
        for reserved in self.reserved:
            for key, size in reserved.items():
                sizes[key] = max(sizes.get(key, 0), size)
        used = sum(sizes.values())
        _demand(
            used <= self._capacity_bytes,
            "C11",
            f"objects and reservations come to {used} bytes; the limit is {self._capacity_bytes} bytes",
        )

    def check_evicted(
        self, before: Collection[ObjectKey], after: Collection[ObjectKey], evicted: Collection[ObjectKey]
    ) -> None:
        """Check the evictions that ``prepare_store`` reports on a medium that is not shared (C11).

        Args:
            before: the objects that were present before it.
            after: the objects that are present after it.
            evicted: the objects that it reports.

        Raises:
            ContractError: an object is gone and not reported, or is reported and present.
        """
        for key in before:
            _demand(key in after or key in evicted, "C11", f"prepare_store evicted {key}, and does not report it")
        for key in evicted:
            _demand(key not in after, "C11", f"prepare_store reports {key} as evicted, which is still present")

    def _expected(self, key: ObjectKey) -> frozenset[Content | None]:
        """Return the contents that ``key`` may have if the medium has not evicted it by itself."""
        return self._contents.get(key, frozenset([None]))

    def _check_store(self, event: StoreEvent, before: frozenset[Content | None], stores: list[StoreEvent]) -> None:
        others = len(stores) > 1 or any(event.key in reserved for reserved in self.reserved)
        if event.outcome is StoreOutcome.ALREADY_PRESENT:
            _demand(
                bool(before - {None}) or others, "C2", f"storing {event.key}: ALREADY_PRESENT, but nothing can be there"
            )
        if event.outcome is StoreOutcome.REJECTED:
            _demand(
                not event.reserved or self._reads is not None,
                "C11",
                f"storing {event.key}: REJECTED after prepare_store has reserved capacity for it",
            )
            _demand(
                self.may_evict or others or self._reads is not None,
                "C5",
                f"storing {event.key}, {event.content.size_bytes} bytes: REJECTED, though "
                + ("the medium has no limit" if self._capacity_bytes is None else "it is less than half full"),
            )

    def _after(
        self,
        key: ObjectKey,
        before: frozenset[Content | None],
        stores: list[StoreEvent],
        deletes: list[DeleteEvent],
        *,
        evicting: bool,
    ) -> frozenset[Content | None]:
        new = {written.content for written in stores if written.outcome in (StoreOutcome.STORED, None)}
        after = before | new
        evictable = evicting and not self.pins[key]
        if deletes:
            sure = any(not deleted.cancelled for deleted in deletes) and not self.pins[key]
            return frozenset(new if sure else after) | {None}
        if any(written.outcome in (StoreOutcome.STORED, StoreOutcome.ALREADY_PRESENT) for written in stores):
            # A batch that evicts may evict one of its own objects for another one.
            return after if evictable else after - {None}
        return after

    def _count_read(self, event: Event) -> None:
        if self._reads is None or None in self._expected(event.key):
            return
        if isinstance(event, LookupEvent):
            found = event.present
        elif isinstance(event, LoadEvent) and event.outcome is not None:
            found = event.outcome is not LoadOutcome.MISS
        else:
            return
        self._reads.stored += 1
        self._reads.found += found

    def _narrow(self, event: Event) -> None:
        allowed = self.allowed(event.key)
        if isinstance(event, LoadEvent) and event.outcome is LoadOutcome.HIT:
            allowed = frozenset(c for c in allowed if c is not None and c.data() == event.after)
        elif isinstance(event, LoadEvent) and event.outcome is LoadOutcome.CORRUPT:
            allowed = frozenset(c for c in allowed if c is not None and c.size_bytes != len(event.before))
        elif isinstance(event, LoadEvent) and event.outcome is LoadOutcome.MISS:
            allowed = frozenset([None])
        elif isinstance(event, LookupEvent):
            allowed = allowed - {None} if event.present else frozenset([None])
        self._contents[event.key] = allowed


def _check_load(event: LoadEvent, during: frozenset[Content | None], loss: str) -> None:
    call = f"loading {event.key} into {len(event.before)} bytes"
    may = f"it may hold {_words(during)}"
    if event.prepared is False:
        _demand(None in during, "C5", f"{call}: prepare_load says that nothing is there; {may}")
    if event.outcome is LoadOutcome.HIT:
        whole = any(content is not None and content.data() == event.after for content in during)
        clause = "C1" if len(during) == 1 else "C6"
        found = f"the buffer begins with {event.after[:16].hex()}" if event.after else "the buffer is empty"
        _demand(whole, clause, f"{call}: HIT with bytes that were not stored whole under that key; {may}; {found}")
    elif event.outcome is LoadOutcome.MISS:
        _demand(None in during, loss, f"{call}: MISS; {may}")
        _demand(event.before == event.after, "C3", f"{call}: MISS, but the buffer was written to")
    elif event.outcome is LoadOutcome.CORRUPT:
        other = any(content is not None and content.size_bytes != len(event.before) for content in during)
        _demand(other, "C16", f"{call}: CORRUPT, though nothing has damaged it; {may}")


def _check_lookup(event: LookupEvent, during: frozenset[Content | None], loss: str) -> None:
    call = f"contains({event.key}) is {event.present}"
    if event.present:
        _demand(bool(during - {None}), "C12", f"{call}, but it was deleted or never stored")
    else:
        _demand(None in during, loss, f"{call}; it may hold {_words(during)}")


def _demand(holds: bool, clause: str, message: str) -> None:
    if not holds:
        raise ContractError(f"{clause}: {message}")


def _words(items: Iterable[object], nothing: str = "nothing") -> str:
    words = sorted("nothing (absent)" if item is None else str(item) for item in items)
    return " or ".join(words) or nothing
