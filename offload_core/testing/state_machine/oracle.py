"""What may be on a medium: per key the contents that a load may bring, kept by brute force.

Most keys allow exactly one content, or exactly "absent". Several are possible where the contract leaves it open: which
of two different contents stored under one key stays (C4), what becomes of an operation that was cancelled, what a
bounded medium has evicted. An operation that reads narrows them down again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from offload_core.api.backend import LoadOutcome, StoredObject, StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.testing.strategies import Content

OVERHEAD_BYTES = 4096
"""What a bounded medium may charge per object beyond its bytes before anything of it counts as lost."""


class ContractError(AssertionError):
    """A backend has broken a clause; the message begins with its number."""


@dataclass
class Written:
    """One object of a store: what was to be written, and the answer, ``None`` when there was none (cancelled)."""

    key: ObjectKey
    content: Content
    outcome: StoreOutcome | None = None
    granted: bool = False


@dataclass
class Read:
    """One object of a load: the buffer's bytes before and after, and the answer, ``None`` when there was none."""

    key: ObjectKey
    before: bytes
    after: bytes = b""
    outcome: LoadOutcome | None = None
    prepared: bool | None = None


@dataclass
class Seen:
    """One answer of ``contains``."""

    key: ObjectKey
    answer: bool


@dataclass
class Deleted:
    """One key of a delete."""

    key: ObjectKey
    cancelled: bool = False


Event = Written | Read | Seen | Deleted


class Oracle:
    """The contents that each key may have.

    Args:
        capacity_bytes: the limit of a bounded medium, else ``None``.
    """

    def __init__(self, capacity_bytes: int | None) -> None:
        self._capacity_bytes = capacity_bytes
        self._offered_bytes = 0
        self._contents: dict[ObjectKey, frozenset[Content | None]] = {}
        self.pins: Counter[ObjectKey] = Counter()
        self.granted: list[dict[ObjectKey, int]] = []
        """Per store reservation that is held: the bytes that it has reserved."""

    @property
    def keys(self) -> list[ObjectKey]:
        """Every key that something was ever stored under."""
        return list(self._contents)

    @property
    def pressed(self) -> bool:
        """Whether so much was offered to a bounded medium that it may evict and reject."""
        return self._capacity_bytes is not None and 2 * self._offered_bytes > self._capacity_bytes

    def allowed(self, key: ObjectKey) -> frozenset[Content | None]:
        """Return the contents that ``key`` may have now; ``None`` stands for absent."""
        return self._contents.get(key, frozenset([None]))

    def likely_size(self, key: ObjectKey) -> int:
        """Return the size of an object that may be there, else 17 bytes."""
        return min((content.size_bytes for content in self.allowed(key) if content is not None), default=17)

    def offer(self, sizes_bytes: Iterable[int]) -> None:
        """Note that room for objects is asked for: what is not pinned may have to go."""
        self._offered_bytes += sum(size + OVERHEAD_BYTES for size in sizes_bytes)
        if self.pressed:
            for key in self._contents:
                if not self.pins[key]:
                    self._contents[key] |= {None}

    def prepared(self, key: ObjectKey, present: bool, *, pins: bool, nbytes: int | None = None) -> None:
        """Take up what ``prepare_load`` says of ``key``; on a bounded medium it pins what is there (C9).

        Args:
            nbytes: the size that it has told, if it has (C19).

        Raises:
            ContractError: it says that nothing is there where something must be, or tells a size that is none.
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

    def settle(self, events: Sequence[Event]) -> None:
        """Check the answers of operations that ran together, and take up what they have changed.

        Raises:
            ContractError: an answer that no order of the operations explains.
        """
        before = {event.key: self.allowed(event.key) for event in events}
        writes = {key: [e for e in events if isinstance(e, Written) and e.key == key] for key in before}
        deletes = {key: [e for e in events if isinstance(e, Deleted) and e.key == key] for key in before}
        for event in events:
            during = before[event.key] | {written.content for written in writes[event.key]}
            if deletes[event.key]:
                during |= {None}
            loss = "C9" if self.pins[event.key] else "C5"
            if isinstance(event, Written):
                self._check_written(event, before[event.key], writes[event.key])
            elif isinstance(event, Read):
                _check_read(event, during, loss)
                pinned = self._capacity_bytes is not None and event.prepared and not deletes[event.key]
                _demand(
                    not (pinned and event.outcome is LoadOutcome.MISS),
                    "C9",
                    f"loading {event.key}: MISS, though prepare_load has found and pinned it just before",
                )
            elif isinstance(event, Seen):
                _check_seen(event, during, loss)
        for key in before:
            self._contents[key] = self._after(key, before[key], writes[key], deletes[key])
        if not any(isinstance(event, Written | Deleted) for event in events):  # nothing has changed meanwhile
            for event in events:
                self._narrow(event)

    def check_listing(self, listed: Sequence[StoredObject], keys: Collection[ObjectKey]) -> None:
        """Check a listing of the medium against ``keys`` (C18).

        Raises:
            ContractError: an object is missing, twice there, of another size, or should not be there.
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

    def check_room(self, present: Collection[ObjectKey]) -> None:
        """Check that what is there and what is reserved fits into a bounded medium (C11).

        Raises:
            ContractError: there is more.
        """
        if self._capacity_bytes is None:
            return
        sizes = {key: self.likely_size(key) for key in present}
        for granted in self.granted:
            for key, size in granted.items():
                sizes[key] = max(sizes.get(key, 0), size)
        used = sum(sizes.values())
        _demand(
            used <= self._capacity_bytes,
            "C11",
            f"objects and reserved room come to {used} bytes; the limit is {self._capacity_bytes} bytes",
        )

    def _check_written(self, event: Written, before: frozenset[Content | None], writes: list[Written]) -> None:
        others = len(writes) > 1 or any(event.key in granted for granted in self.granted)
        if event.outcome is StoreOutcome.ALREADY_PRESENT:
            _demand(
                bool(before - {None}) or others, "C2", f"storing {event.key}: ALREADY_PRESENT, but nothing can be there"
            )
        if event.outcome is StoreOutcome.REJECTED:
            _demand(
                not event.granted, "C11", f"storing {event.key}: REJECTED after prepare_store has reserved room for it"
            )
            _demand(
                self.pressed or others,
                "C5",
                f"storing {event.key}, {event.content.size_bytes} bytes: REJECTED, though "
                + ("the medium has no limit" if self._capacity_bytes is None else "it is less than half full"),
            )

    def _after(
        self, key: ObjectKey, before: frozenset[Content | None], writes: list[Written], deletes: list[Deleted]
    ) -> frozenset[Content | None]:
        new = {written.content for written in writes if written.outcome in (StoreOutcome.STORED, None)}
        after = before | new
        evictable = self.pressed and not self.pins[key]
        if deletes:
            sure = any(not deleted.cancelled for deleted in deletes) and not self.pins[key]
            return frozenset(new if sure else after) | {None}
        if any(written.outcome in (StoreOutcome.STORED, StoreOutcome.ALREADY_PRESENT) for written in writes):
            # Of a batch that evicts, an object may have to make room for another one of the same batch.
            return after if evictable else after - {None}
        return after

    def _narrow(self, event: Event) -> None:
        allowed = self.allowed(event.key)
        if isinstance(event, Read) and event.outcome is LoadOutcome.HIT:
            allowed = frozenset(c for c in allowed if c is not None and c.data() == event.after)
        elif isinstance(event, Read) and event.outcome is LoadOutcome.CORRUPT:
            allowed = frozenset(c for c in allowed if c is not None and c.size_bytes != len(event.before))
        elif isinstance(event, Read) and event.outcome is LoadOutcome.MISS:
            allowed = frozenset([None])
        elif isinstance(event, Seen):
            allowed = allowed - {None} if event.answer else frozenset([None])
        self._contents[event.key] = allowed


def _check_read(event: Read, during: frozenset[Content | None], loss: str) -> None:
    what = f"loading {event.key} into {len(event.before)} bytes"
    may = f"it may hold {_words(during)}"
    if event.prepared is False:
        _demand(None in during, "C5", f"{what}: prepare_load says that nothing is there; {may}")
    if event.outcome is LoadOutcome.HIT:
        whole = any(content is not None and content.data() == event.after for content in during)
        clause = "C1" if len(during) == 1 else "C6"
        found = f"the buffer begins with {event.after[:16].hex()}" if event.after else "the buffer is empty"
        _demand(whole, clause, f"{what}: HIT with bytes that were not stored whole under that key; {may}; {found}")
    elif event.outcome is LoadOutcome.MISS:
        _demand(None in during, loss, f"{what}: MISS; {may}")
        _demand(event.before == event.after, "C3", f"{what}: MISS, but the buffer was written to")
    elif event.outcome is LoadOutcome.CORRUPT:
        other = any(content is not None and content.size_bytes != len(event.before) for content in during)
        _demand(other, "C16", f"{what}: CORRUPT, though nothing has damaged it; {may}")


def _check_seen(event: Seen, during: frozenset[Content | None], loss: str) -> None:
    what = f"contains({event.key}) is {event.answer}"
    if event.answer:
        _demand(bool(during - {None}), "C12", f"{what}, but it was deleted or never stored")
    else:
        _demand(None in during, loss, f"{what}; it may hold {_words(during)}")


def _demand(holds: bool, clause: str, message: str) -> None:
    if not holds:
        raise ContractError(f"{clause}: {message}")


def _words(items: Iterable[object], nothing: str = "nothing") -> str:
    words = sorted("nothing (absent)" if item is None else str(item) for item in items)
    return " or ".join(words) or nothing
