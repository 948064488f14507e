"""The queue of one tier's stores: order, concurrent calls, deadlines, and drops that free staging bytes.

A batch is *preparing* until its objects are sealed. Then it is *waiting* for a slot and, with a slot, *running*. Only
waiting objects can be dropped. This module has no clock, no lock and no I/O: the queue's owner passes the time in and
serialises the calls.
"""

from __future__ import annotations

import enum
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Generic, TypeVar

T = TypeVar("T")


class BatchState(enum.Enum):
    """The state of a batch."""

    PREPARING = "preparing"
    """Its objects are being sealed: their memory is in use."""
    WAITING = "waiting"
    """It waits for a slot. Nothing uses its objects' memory."""
    RUNNING = "running"
    """The tier's call uses its objects' memory."""
    GONE = "gone"
    """It has left the queue, and no longer uses its objects' memory."""


NEXT_STATES: Final[Mapping[BatchState, frozenset[BatchState]]] = {
    BatchState.PREPARING: frozenset({BatchState.WAITING, BatchState.GONE}),
    BatchState.WAITING: frozenset({BatchState.RUNNING, BatchState.GONE}),
    BatchState.RUNNING: frozenset({BatchState.GONE}),
    BatchState.GONE: frozenset(),
}
"""Per state, the states that may follow."""


class StoreBatch(Generic[T]):
    """Objects with one deadline that go to the tier in one call. Any thread may read it; only its queue changes it.

    Args:
        age: smaller for an older batch.
        deadline: by the owner's clock, in seconds.
    """

    def __init__(self, age: int, items: Sequence[T], deadline: float) -> None:
        self.age = age
        self.items = list(items)
        """The objects that have not been dropped."""
        self.size = len(items)
        """The number of objects at first."""
        self.deadline = deadline
        self.state = BatchState.PREPARING
        self.expired = False
        """True if its deadline passed while it was in the queue."""
        self._call: StoreCall[T] | None = None
        """Its call while it is running."""

    def _move(self, state: BatchState) -> None:
        if state not in NEXT_STATES[self.state]:
            good = ", ".join(sorted(other.value for other in NEXT_STATES[self.state])) or "none"
            raise RuntimeError(f"a batch that is {self.state.value} cannot be {state.value} next; it may be: {good}")
        self.state = state


class StoreCall(Generic[T]):
    """One call of the tier: its batches, the oldest first, and the number of slots that it takes."""

    def __init__(self, batches: Sequence[StoreBatch[T]], slots: int) -> None:
        self.batches = tuple(batches)
        self.slots = slots
        self._overdue = False

    @property
    def items(self) -> list[T]:
        """The objects of all its batches, in order."""
        return [item for batch in self.batches for item in batch.items]


class StoreQueue(Generic[T]):
    """The store queue of one tier.

    Args:
        slots: slots for concurrent calls within their deadlines. A call starts if at least one is free, and may take
            more than are left.
        spare_slots: maximum number of slots of overdue calls that other batches may use. Further overdue calls keep
            their slots. So hung calls do not stop all stores of the tier, and their number is bounded.
        charge_bytes: returns the bytes of the tier's share that an object takes.
        slots_of_call: returns the slots that a call of so many batches takes, at least 1.
    """

    def __init__(
        self,
        slots: int,
        spare_slots: int,
        charge_bytes: Callable[[T], int],
        slots_of_call: Callable[[int], int] = lambda batches: 1,
    ) -> None:
        self._slots = slots
        self._spare_slots = spare_slots
        self._charge_bytes = charge_bytes
        self._slots_of_call = slots_of_call
        self._last_age = 0
        self._on_time: OrderedDict[StoreBatch[T], None] = OrderedDict()  # in order of age, and so of deadlines
        self._waiting: list[StoreBatch[T]] = []  # in order of age
        self._waiting_bytes = 0
        self._running = 0  # slots of running calls
        self._overdue = 0  # slots of those with a batch that has missed its deadline

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline that has not passed; ``None`` if no batch is within its deadline."""
        return next(iter(self._on_time)).deadline if self._on_time else None

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the tier's share that waiting objects take."""
        return self._waiting_bytes

    def begin(self, items: Sequence[T], deadline: float) -> StoreBatch[T]:
        """Add a batch that is being prepared.

        Args:
            items: the oldest first; younger than all objects in the queue.
            deadline: no earlier than those of the batches before.
        """
        self._last_age += 1
        batch = StoreBatch(self._last_age, items, deadline)
        self._on_time[batch] = None
        return batch

    def prepared(self, batch: StoreBatch[T], *, sealed: bool = True) -> bool:
        """Let a batch wait for a slot. Returns ``False`` if it leaves the queue: it is not sealed, or has expired."""
        if batch.expired or not sealed:
            self._on_time.pop(batch, None)
            batch._move(BatchState.GONE)
            return False
        batch._move(BatchState.WAITING)
        insort(self._waiting, batch, key=lambda other: other.age)
        self._waiting_bytes += self._batch_bytes(batch)
        return True

    def start_next(self, take: Callable[[Iterator[int], int], int] = lambda sizes, most: 1) -> StoreCall[T] | None:
        """Give the oldest waiting batches a slot; ``None`` if no batch waits or no slot is free.

        Args:
            take: returns the number of batches in the call, at least 1. It is called with the charges of the waiting
                batches, and with the number at which the free slots are enough for all of them.
        """
        free = self._slots - (self._running - min(self._overdue, self._spare_slots))
        if not self._waiting or free <= 0:
            return None
        calls = -(-free // self._slots_of_call(len(self._waiting)))
        count = take(map(self._batch_bytes, self._waiting), -(-len(self._waiting) // calls))
        batches, self._waiting = self._waiting[:count], self._waiting[count:]
        call = StoreCall(batches, self._slots_of_call(count))
        for batch in batches:
            self._waiting_bytes -= self._batch_bytes(batch)
            batch._move(BatchState.RUNNING)
            batch._call = call
        self._running += call.slots
        return call

    def ended(self, call: StoreCall[T]) -> None:
        """Note that a call has really ended: its slots are free."""
        for batch in call.batches:
            batch._move(BatchState.GONE)
            batch._call = None
            self._on_time.pop(batch, None)
        self._running -= call.slots
        self._overdue -= call.slots * call._overdue

    def expire(self, now: float) -> list[tuple[StoreBatch[T], BatchState]]:
        """Return newly expired batches, each with its state until now. A waiting batch leaves the queue."""
        due: list[tuple[StoreBatch[T], BatchState]] = []
        while self._on_time and (batch := next(iter(self._on_time))).deadline <= now:
            del self._on_time[batch]
            batch.expired = True
            due.append((batch, batch.state))
            if batch.state is BatchState.WAITING:
                self._waiting.remove(batch)
                self._waiting_bytes -= self._batch_bytes(batch)
                batch._move(BatchState.GONE)
            elif batch._call is not None and not batch._call._overdue:
                batch._call._overdue = True
                self._overdue += batch._call.slots
        return due

    def waiting(self) -> Iterator[tuple[StoreBatch[T], T]]:
        """Yield waiting objects, the oldest first. The queue must not change meanwhile."""
        for batch in self._waiting:
            for item in batch.items:
                yield batch, item

    def drop_oldest(self, nbytes: int) -> list[tuple[StoreBatch[T], T]]:
        """Drop the oldest waiting objects until ``nbytes`` bytes of the share are free.

        Returns:
            The dropped objects, each with its batch. Nothing is dropped if all waiting objects would not be enough.
        """
        dropped: list[tuple[StoreBatch[T], T]] = []
        if nbytes <= self._waiting_bytes:
            for batch, item in self.waiting():
                if nbytes <= 0:
                    break
                nbytes -= self._charge_bytes(item)
                dropped.append((batch, item))
        for batch, item in dropped:
            self.drop(batch, item)
        return dropped

    def drop(self, batch: StoreBatch[T], item: T) -> None:
        """Drop a waiting object. A batch that becomes empty leaves the queue.

        Raises:
            RuntimeError: the batch is not waiting.
        """
        if batch.state is not BatchState.WAITING:
            raise RuntimeError(
                f"an object of a batch that is {batch.state.value} cannot be dropped; it must be waiting"
            )
        batch.items.remove(item)
        self._waiting_bytes -= self._charge_bytes(item)
        if not batch.items:
            self._waiting.remove(batch)
            del self._on_time[batch]
            batch._move(BatchState.GONE)

    def _batch_bytes(self, batch: StoreBatch[T]) -> int:
        return sum(map(self._charge_bytes, batch.items))
