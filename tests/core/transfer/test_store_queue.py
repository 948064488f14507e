"""The store queue of one tier: order, slots, deadlines, and drops of the oldest objects."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from offload_core.transfer.stores.store_queue import BatchState, StoreBatch, StoreCall, StoreQueue


@dataclass(eq=False)
class Item:
    nbytes: int


@dataclass(eq=False)
class Expected:
    """The oracle's state of a batch."""

    batch: StoreBatch[Item]
    items: list[Item]
    deadline: float
    state: BatchState = BatchState.PREPARING
    expired: bool = False


@dataclass
class Oracle:
    """All batches that were ever begun, in order of age, and the running calls."""

    batches: list[Expected] = field(default_factory=list)
    calls: list[tuple[StoreCall[Item], list[Expected]]] = field(default_factory=list)
    max_slots_of_call: int = 1

    def at(self, *states: BatchState) -> list[Expected]:
        return [batch for batch in self.batches if batch.state in states]

    def waiting(self) -> list[tuple[StoreBatch[Item], Item]]:
        return [(batch.batch, item) for batch in self.at(BatchState.WAITING) for item in batch.items]

    def remove(self, dropped: Item) -> None:
        for batch in self.at(BatchState.WAITING):
            if dropped in batch.items:
                batch.items.remove(dropped)
                if not batch.items:
                    batch.state = BatchState.GONE

    def free_slots(self, slots: int, spare: int) -> int:
        taken = [self.slots_of(len(batches)) for _, batches in self.calls]
        late = [any(batch.expired for batch in batches) for _, batches in self.calls]
        overdue = sum(slots for slots, is_late in zip(taken, late, strict=True) if is_late)
        return min(slots - (sum(taken) - overdue), slots + spare - sum(taken))

    def slots_of(self, batches: int) -> int:
        return min(batches, self.max_slots_of_call)


class Queues(RuleBasedStateMachine):
    """The queue and the oracle agree after any sequence of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.oracle = Oracle()
        self.now = 0.0

    @initialize(slots=st.integers(1, 3), spare=st.integers(0, 2), of_call=st.integers(1, 3))
    def start(self, slots: int, spare: int, of_call: int) -> None:
        self.slots, self.spare, self.oracle.max_slots_of_call = slots, spare, of_call
        self.queue: StoreQueue[Item] = StoreQueue(slots, spare, lambda item: item.nbytes, self.oracle.slots_of)

    def batch(self, index: int, *states: BatchState) -> Expected | None:
        found = self.oracle.at(*states)
        return found[index % len(found)] if found else None

    @rule(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3), seconds=st.integers(0, 3))
    def begin(self, sizes: list[int], seconds: int) -> None:
        items = [Item(nbytes) for nbytes in sizes]
        deadline = max([self.now + seconds, *(batch.deadline for batch in self.oracle.batches)])
        batch = self.queue.begin(items, deadline)
        assert batch.size == len(items)
        self.oracle.batches.append(Expected(batch, items, deadline))

    @rule(index=st.integers(0, 9), sealed=st.sampled_from([True, True, True, False]))
    def prepared(self, index: int, sealed: bool) -> None:
        if (batch := self.batch(index, BatchState.PREPARING)) is not None:
            waits = sealed and not batch.expired
            assert self.queue.prepared(batch.batch, sealed=sealed) is waits
            batch.state = BatchState.WAITING if waits else BatchState.GONE

    @rule(max_batches=st.integers(1, 4))
    def start_next(self, max_batches: int) -> None:
        asked: list[tuple[list[int], int]] = []

        def take(sizes: Iterator[int], most: int) -> int:
            asked.append((list(sizes), most))
            return min(most, max_batches)

        call = self.queue.start_next(take)
        waiting = self.oracle.at(BatchState.WAITING)
        free = self.oracle.free_slots(self.slots, self.spare)
        if not waiting or free <= 0:
            assert call is None
            assert not asked
            return
        assert call is not None
        ((sizes, most),) = asked
        assert sizes == [sum(item.nbytes for item in batch.items) for batch in waiting]
        calls = math.ceil(free / self.oracle.slots_of(len(waiting)))
        assert (most - 1) * calls < len(waiting) <= most * calls, "the other calls in free slots get as many"
        oldest = waiting[: min(most, max_batches)]
        assert [batch.batch for batch in oldest] == list(call.batches), "the oldest, in order"
        assert call.items == [item for batch in oldest for item in batch.items]
        assert call.slots == self.oracle.slots_of(len(oldest))
        for batch in oldest:
            batch.state = BatchState.RUNNING
        self.oracle.calls.append((call, oldest))

    @rule(index=st.integers(0, 9))
    def ended(self, index: int) -> None:
        if self.oracle.calls:
            call, batches = self.oracle.calls.pop(index % len(self.oracle.calls))
            self.queue.ended(call)
            for batch in batches:
                batch.state = BatchState.GONE

    @rule(seconds=st.integers(0, 2))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        due = []
        for batch in self.oracle.batches:
            if batch.state is not BatchState.GONE and not batch.expired and batch.deadline <= self.now:
                due.append((batch.batch, batch.state))
                batch.expired = True
                if batch.state is BatchState.WAITING:
                    batch.state = BatchState.GONE
        assert self.queue.expire(self.now) == due

    @rule(nbytes=st.integers(0, 12))
    def drop_oldest(self, nbytes: int) -> None:
        waiting = self.oracle.waiting()
        fewest = next((n for n in range(len(waiting) + 1) if sum(i.nbytes for _, i in waiting[:n]) >= nbytes), 0)
        assert self.queue.drop_oldest(nbytes) == waiting[:fewest]
        for _, item in waiting[:fewest]:
            self.oracle.remove(item)

    @rule(index=st.integers(0, 9))
    def drop(self, index: int) -> None:
        waiting = self.oracle.waiting()
        if waiting:
            batch, item = waiting[index % len(waiting)]
            self.queue.drop(batch, item)
            self.oracle.remove(item)

    @rule(index=st.integers(0, 9))
    @precondition(lambda self: self.oracle.at(BatchState.PREPARING, BatchState.RUNNING))
    def nothing_is_dropped_whose_memory_is_in_use(self, index: int) -> None:
        batch = self.batch(index, BatchState.PREPARING, BatchState.RUNNING)
        assert batch is not None
        with pytest.raises(RuntimeError, match="must be waiting"):
            self.queue.drop(batch.batch, batch.items[0])

    @invariant()
    def both_agree(self) -> None:
        if not self.oracle.batches:
            return
        assert list(self.queue.waiting()) == self.oracle.waiting()
        for batch in self.oracle.batches:
            assert (batch.batch.state, batch.batch.expired) == (batch.state, batch.expired)
            if batch.state is not BatchState.GONE:
                assert batch.batch.items == batch.items
        in_time = [b for b in self.oracle.batches if b.state is not BatchState.GONE and not b.expired]
        assert self.queue.next_deadline == (in_time[0].deadline if in_time else None)
        assert self.queue.waiting_bytes == sum(item.nbytes for _, item in self.oracle.waiting())


TestQueues = Queues.TestCase
TestQueues.settings = settings(max_examples=150, stateful_step_count=30)


def test_each_state_is_left_only_as_the_table_says() -> None:
    queue: StoreQueue[Item] = StoreQueue(1, 0, lambda item: item.nbytes)
    batch = queue.begin([Item(1)], 1.0)
    queue.prepared(batch)
    with pytest.raises(RuntimeError, match="a batch that is waiting cannot be waiting next; it may be: gone, running"):
        queue.prepared(batch)
    call = queue.start_next()
    assert call is not None
    with pytest.raises(RuntimeError, match="a batch that is running cannot be waiting next; it may be: gone"):
        queue.prepared(batch)
    queue.ended(call)
    with pytest.raises(RuntimeError, match="a batch that is gone cannot be gone next; it may be: none"):
        queue.ended(call)


def test_overdue_calls_give_up_as_many_slots_as_there_are_spare_ones() -> None:
    queue: StoreQueue[Item] = StoreQueue(2, 1, lambda item: item.nbytes)
    for deadline in range(1, 6):
        queue.prepared(queue.begin([Item(1)], deadline))
    hung = [queue.start_next(), queue.start_next()]
    assert queue.start_next() is None, "both slots are taken"
    assert [state for _, state in queue.expire(2.0)] == [BatchState.RUNNING] * 2
    third = queue.start_next()
    assert third is not None
    assert queue.start_next() is None, "the second one that hangs keeps its slot"
    assert hung[0] is not None
    queue.ended(hung[0])
    assert queue.start_next() is not None


def test_a_call_with_several_late_batches_gives_up_one_slot() -> None:
    queue: StoreQueue[Item] = StoreQueue(1, 1, lambda item: item.nbytes)
    for deadline in (1, 1, 3, 3, 3):
        queue.prepared(queue.begin([Item(1)], deadline))
    hung = queue.start_next(lambda sizes, most: 2)
    assert hung is not None
    assert len(hung.batches) == 2
    assert len(queue.expire(1.0)) == 2
    second = queue.start_next()
    assert second is not None
    assert queue.start_next() is None, "one hung call, one spare slot"
    queue.ended(hung)
    assert queue.start_next() is None, "its slot is the one that the second call has"
    queue.ended(second)
    assert queue.start_next() is not None


def test_a_call_leaves_batches_for_the_other_free_slots() -> None:
    queue: StoreQueue[Item] = StoreQueue(3, 0, lambda item: item.nbytes)
    for number in range(5):
        queue.prepared(queue.begin([Item(number + 1)], 1.0))
    calls = [queue.start_next(lambda sizes, most: most) for _ in range(4)]
    taken = [None if call is None else [item.nbytes for item in call.items] for call in calls]
    assert taken == [[1, 2], [3, 4], [5], None]
