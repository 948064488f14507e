"""What one tier is to store: in which order, how many calls at once, until when, and what goes to make room.

Batches are *preparing* until their objects are sealed, then they are *waiting* for a slot and, with a slot, *running*.
Only what waits can be dropped. No clock, no lock and no I/O here: a queue's owner passes the time in and keeps threads
apart.
"""

from __future__ import annotations

import enum
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Generic, TypeVar

T = TypeVar("T")


class Place(enum.Enum):
    """Where a batch is."""

    PREPARING = "preparing"
    """Its objects are being sealed: their memory is in use."""
    WAITING = "waiting"
    """For a slot. Nothing uses its objects' memory."""
    RUNNING = "running"
    """The tier's call has it."""
    GONE = "gone"
    """Out of the queue, and its objects' memory is not in use for it."""


NEXT_PLACES: Final[Mapping[Place, frozenset[Place]]] = {
    Place.PREPARING: frozenset({Place.WAITING, Place.GONE}),
    Place.WAITING: frozenset({Place.RUNNING, Place.GONE}),
    Place.RUNNING: frozenset({Place.GONE}),
    Place.GONE: frozenset(),
}
"""Which place may follow which."""


class StoreBatch(Generic[T]):
    """Objects that go to the tier in one call. Anyone may read it; only its queue changes it.

    Args:
        age: smaller for what is older.
        deadline: by the owner's clock, in seconds.
    """

    def __init__(self, age: int, items: Sequence[T], deadline: float) -> None:
        self.age = age
        self.items = list(items)
        """What of it has not been dropped."""
        self.size = len(items)
        """Its objects at first."""
        self.deadline = deadline
        self.place = Place.PREPARING
        self.expired = False
        """Whether its deadline came while it was in the queue."""

    def _move(self, place: Place) -> None:
        if place not in NEXT_PLACES[self.place]:
            good = ", ".join(sorted(other.value for other in NEXT_PLACES[self.place])) or "none"
            raise RuntimeError(f"a batch that is {self.place.value} cannot be {place.value} next; it may be: {good}")
        self.place = place


class StoreQueue(Generic[T]):
    """The store queue of one tier.

    Args:
        slots: calls at once that are within their deadlines.
        spare_slots: calls beyond their deadlines whose slots others get; further ones keep theirs. So what hangs for
            ever does not end all stores of the tier, and is bounded.
        weigh: how many bytes of the tier's share an object takes.
    """

    def __init__(self, slots: int, spare_slots: int, weigh: Callable[[T], int]) -> None:
        self._slots = slots
        self._spare_slots = spare_slots
        self._weigh = weigh
        self._ages = 0
        self._on_time: OrderedDict[StoreBatch[T], None] = OrderedDict()  # in order of age, and so of deadlines
        self._waiting: list[StoreBatch[T]] = []  # in order of age
        self._waiting_bytes = 0
        self._running = 0
        self._overdue = 0  # of those that run

    @property
    def next_deadline(self) -> float | None:
        """The first deadline that has not passed, or ``None`` when nothing is in the queue in time."""
        return next(iter(self._on_time)).deadline if self._on_time else None

    @property
    def waiting_bytes(self) -> int:
        """What of the tier's share is taken by objects that wait."""
        return self._waiting_bytes

    def begin(self, items: Sequence[T], deadline: float) -> StoreBatch[T]:
        """Take up a batch that is being prepared.

        Args:
            items: the oldest first; younger than all that is in the queue.
            deadline: no earlier than those of the batches before.
        """
        self._ages += 1
        batch = StoreBatch(self._ages, items, deadline)
        self._on_time[batch] = None
        return batch

    def prepared(self, batch: StoreBatch[T], *, well: bool = True) -> bool:
        """Let a batch wait for a slot; returns ``False`` if it is gone: its deadline came, or it was not done well."""
        if batch.expired or not well:
            self._on_time.pop(batch, None)
            batch._move(Place.GONE)
            return False
        batch._move(Place.WAITING)
        insort(self._waiting, batch, key=lambda other: other.age)
        self._waiting_bytes += self._weight(batch)
        return True

    def start_next(self) -> StoreBatch[T] | None:
        """Give the oldest batch that waits a slot; ``None`` when none waits or no slot is free."""
        taken = self._running - min(self._overdue, self._spare_slots)
        if not self._waiting or taken >= self._slots:
            return None
        batch = self._waiting.pop(0)
        self._waiting_bytes -= self._weight(batch)
        self._running += 1
        batch._move(Place.RUNNING)
        return batch

    def ended(self, batch: StoreBatch[T]) -> None:
        """Note that the call of a batch has really ended: its slot is free."""
        batch._move(Place.GONE)
        self._on_time.pop(batch, None)
        self._running -= 1
        self._overdue -= batch.expired

    def expire(self, now: float) -> list[tuple[StoreBatch[T], Place]]:
        """Return the batches whose deadlines have come, each once, and where they were. What waited is gone."""
        due: list[tuple[StoreBatch[T], Place]] = []
        while self._on_time and (batch := next(iter(self._on_time))).deadline <= now:
            del self._on_time[batch]
            batch.expired = True
            due.append((batch, batch.place))
            if batch.place is Place.WAITING:
                self._waiting.remove(batch)
                self._waiting_bytes -= self._weight(batch)
                batch._move(Place.GONE)
            elif batch.place is Place.RUNNING:
                self._overdue += 1
        return due

    def waiting(self) -> Iterator[tuple[StoreBatch[T], T]]:
        """Yield what waits, the oldest first. The queue must not change meanwhile."""
        for batch in self._waiting:
            for item in batch.items:
                yield batch, item

    def make_room(self, nbytes: int) -> list[tuple[StoreBatch[T], T]]:
        """Drop the oldest objects that wait until ``nbytes`` bytes of the share are freed.

        Returns:
            What was dropped, with its batch. Nothing where all that waits would not be enough.
        """
        dropped: list[tuple[StoreBatch[T], T]] = []
        if nbytes <= self._waiting_bytes:
            for batch, item in self.waiting():
                if nbytes <= 0:
                    break
                nbytes -= self._weigh(item)
                dropped.append((batch, item))
        for batch, item in dropped:
            self.drop(batch, item)
        return dropped

    def drop(self, batch: StoreBatch[T], item: T) -> None:
        """Drop an object that waits; a batch of which nothing is left is gone."""
        if batch.place is not Place.WAITING:
            raise RuntimeError(f"an object of a batch that is {batch.place.value} cannot be dropped, only what waits")
        batch.items.remove(item)
        self._waiting_bytes -= self._weigh(item)
        if not batch.items:
            self._waiting.remove(batch)
            del self._on_time[batch]
            batch._move(Place.GONE)

    def _weight(self, batch: StoreBatch[T]) -> int:
        return sum(map(self._weigh, batch.items))
