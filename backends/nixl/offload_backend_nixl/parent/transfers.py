"""The loads and stores of a batch, through slots of the ring, or between the medium and the caller's buffers.

Several objects are in progress at the same time: while the child reads or writes some, this thread copies, checks or
seals another. A child may write to the buffers of loads. So a function that raises has first waited for the end of the
transfers, or of the child. Then the buffers are the caller's again.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from offload_backend_nixl.frame import HEAD_BYTES, OVERHEAD_BYTES, clear_frame, is_whole, write_frame
from offload_backend_nixl.naming import name_of
from offload_backend_nixl.parent.connection import Child, ChildError, Place, Ticket
from offload_backend_nixl.parent.ring import Slot
from offload_backend_nixl.protocol import RING, Answer, Operation, Outcome
from offload_core.api import CHECK_BYTES, LoadCheck, LoadOutcome, ObjectKey, StoreOutcome, StoreSeal

MAX_IN_PROGRESS = 8
"""The most objects of one batch that the child transfers at the same time."""


@dataclass(frozen=True)
class _Object:
    """One object of a batch."""

    index: int
    key: ObjectKey
    buffer: memoryview
    slot: Slot
    place: Place | None
    """The place of the buffer, if the child moves the content; ``None`` if the content passes through the slot."""
    ticket: Ticket


def fits(child: Child, nbytes: int) -> bool:
    """Return whether an object can be transferred at all."""
    return nbytes + OVERHEAD_BYTES <= child.ring.nbytes


def load_batch(
    child: Child,
    keys: Sequence[ObjectKey],
    buffers: Sequence[memoryview],
    deadline_seconds: float,
    checks: Sequence[LoadCheck] = (),
    *,
    in_place: bool = False,
) -> list[LoadOutcome]:
    """Load objects. An object that is larger than the ring is a miss.

    Args:
        checks: one per key, told of each part that has arrived; or none.
        in_place: whether the child may move content to buffers in shared memory.

    Raises:
        OSError: the medium or the child failed.
    """
    outcomes = [LoadOutcome.MISS] * len(keys)

    def finish(loaded: _Object, answer: Answer) -> None:
        if answer.outcome is Outcome.CORRUPT:
            outcomes[loaded.index] = LoadOutcome.CORRUPT
        elif answer.outcome is Outcome.DONE:
            outcomes[loaded.index] = _take(child, loaded, checks[loaded.index] if checks else None)
        elif answer.outcome is not Outcome.MISS:
            raise child.failure(answer)

    try:
        _run(child, Operation.LOAD, keys, buffers, finish, deadline_seconds, in_place=in_place)
    except ChildError:
        if in_place:
            child.wait_gone()
        raise
    return outcomes


def store_batch(
    child: Child,
    keys: Sequence[ObjectKey],
    buffers: Sequence[memoryview],
    deadline_seconds: float,
    seals: Sequence[StoreSeal] = (),
    *,
    in_place: bool = False,
) -> list[StoreOutcome]:
    """Store objects. An object that is larger than the ring is rejected.

    Args:
        seals: one per key, which seal the objects before the child writes them; or none.
        in_place: whether the child may move content from buffers in shared memory.

    Raises:
        OSError: the medium or the child failed.
    """
    outcomes = [StoreOutcome.REJECTED] * len(keys)

    def finish(stored: _Object, answer: Answer) -> None:
        if answer.outcome is not Outcome.DONE:
            raise child.failure(answer)
        outcomes[stored.index] = StoreOutcome.STORED

    _run(child, Operation.STORE, keys, buffers, finish, deadline_seconds, seals, in_place=in_place)
    return outcomes


def _run(
    child: Child,
    operation: Operation,
    keys: Sequence[ObjectKey],
    buffers: Sequence[memoryview],
    finish: Callable[[_Object, Answer], None],
    deadline_seconds: float,
    seals: Sequence[StoreSeal] = (),
    *,
    in_place: bool,
) -> None:
    """Transfer a batch. After an error nothing more begins, and the transfers in progress are awaited.

    Slots of a child that has ended are not given back: their memory goes with the child.
    """
    in_progress: deque[_Object] = deque()

    def finish_first() -> None:
        first = in_progress.popleft()
        answer = child.wait(first.ticket)
        try:
            finish(first, answer)
        finally:
            child.ring.release(first.slot)

    try:
        for index, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            if not fits(child, len(buffer)):
                continue
            place = child.place_of(buffer) if in_place else None
            nbytes = OVERHEAD_BYTES + (len(buffer) if place is None else 0)
            while (slot := _reserve(child, nbytes, bool(in_progress), deadline_seconds)) is None:
                finish_first()
            parts = seals[index].parts(buffer) if seals else [(0, buffer)]
            in_progress.append(_begin(child, operation, index, key, buffer, parts, slot, place))
            if len(in_progress) == MAX_IN_PROGRESS:
                finish_first()
        while in_progress:
            finish_first()
    except ChildError:
        raise
    except BaseException:
        for left in in_progress:
            child.wait(left.ticket)
            child.ring.release(left.slot)
        raise


def _reserve(child: Child, nbytes: int, at_once: bool, deadline_seconds: float) -> Slot | None:
    """Return a slot. A caller with objects in progress does not wait: it must end those first."""
    now = time.monotonic()
    slot = child.ring.reserve(nbytes, now if at_once else now + deadline_seconds)
    if slot is None and not at_once:
        raise OSError(errno.ETIMEDOUT, f"no room for {nbytes} bytes for {deadline_seconds:g} s; raise the option ring")
    return slot


def _begin(
    child: Child,
    operation: Operation,
    index: int,
    key: ObjectKey,
    buffer: memoryview,
    parts: Iterable[tuple[int, memoryview]],
    slot: Slot,
    place: Place | None,
) -> _Object:
    try:
        with child.ring.view(slot) as memory:
            if operation is Operation.STORE:
                write_frame(memory, key, len(buffer))
            else:
                clear_frame(memory)
        if operation is Operation.STORE and len(buffer):
            for offset, part in parts:  # each is sealed after it
                if place is None:
                    child.ring.write(slot, HEAD_BYTES + offset, part)
        memory_number, start = place or (RING, 0)
        ticket = child.send(
            operation,
            offset=slot.offset,
            nbytes=len(buffer) + OVERHEAD_BYTES,
            memory=memory_number,
            start=start,
            names=(name_of(key),),
        )
    except ChildError:
        raise
    except BaseException:
        child.ring.release(slot)  # the child never heard of it
        raise
    return _Object(index, key, buffer, slot, place, ticket)


def _take(child: Child, loaded: _Object, check: LoadCheck | None) -> LoadOutcome:
    """Check an object that has arrived, and copy it out of the ring if it is there."""
    with child.ring.view(loaded.slot) as memory:
        if not is_whole(memory, loaded.key, len(loaded.buffer)):
            return LoadOutcome.CORRUPT
    if loaded.place is not None and check is None:
        return LoadOutcome.HIT
    step = len(loaded.buffer) if check is None else CHECK_BYTES
    for start in range(0, len(loaded.buffer), step or 1):
        part = loaded.buffer[start : start + step]
        if loaded.place is None:
            child.ring.read(loaded.slot, HEAD_BYTES + start, part)
        if check is not None:
            check.filled(len(part))
    return LoadOutcome.HIT
