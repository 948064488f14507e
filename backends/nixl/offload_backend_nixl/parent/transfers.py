"""The loads and stores of a batch, through slots of the ring, or between the medium and the caller's buffers.

While the child reads or writes some objects, this thread copies, checks or seals another. If the child does all of the
work for some objects, they share a request.

A child may write to the buffers of loads. So a function that raises has first waited for the end of the transfers, or
of the child. Then the buffers are the caller's again.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from offload_backend_nixl.frame import HEAD_BYTES, OVERHEAD_BYTES, clear_frame, is_whole, write_frame
from offload_backend_nixl.naming import name_of
from offload_backend_nixl.parent.connection import Child, ChildError, Place, Ticket
from offload_backend_nixl.parent.ring import Slot
from offload_backend_nixl.protocol import (
    LOAD_ENDS,
    NO_HASH,
    RING,
    STORE_ENDS,
    Answer,
    Item,
    Operation,
    Outcome,
    Result,
)
from offload_core.api import CHECK_BYTES, LoadCheck, LoadOutcome, ObjectKey, StoreOutcome, StoreSeal

MAX_GROUP = 16
"""The most objects of one request."""
MAX_GROUP_BYTES = 32 * 1024**2
"""A request with so many bytes gets no other object, since all of its objects share one deadline."""
MAX_IN_PROGRESS = 8
"""While the child has so many objects of a batch in two requests or more, it gets no other of this batch."""


@dataclass(frozen=True)
class _Object:
    """One object of a batch."""

    index: int
    key: ObjectKey
    buffer: memoryview
    place: Place | None
    """The place of the buffer, if the child moves the content; ``None`` if the content passes through the ring."""
    hash_start: int
    """The content from this byte on is hashed by the child; :data:`NO_HASH` for none."""
    is_alone: bool
    """``True`` if this thread works on the object too, so that it has a request of its own."""

    @property
    def ring_bytes(self) -> int:
        return OVERHEAD_BYTES + (len(self.buffer) if self.place is None else 0)


@dataclass(frozen=True)
class _Request:
    """Objects on their way, and their slot."""

    objects: Sequence[_Object]
    slot: Slot
    ticket: Ticket


def _parts(objects: Sequence[_Object], slot: Slot) -> Iterator[tuple[_Object, Slot]]:
    """Yield the objects of a request, each with its part of the slot."""
    offset = slot.offset
    for one in objects:
        yield one, Slot(offset, one.ring_bytes)
        offset += one.ring_bytes


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

    def finish(loaded: _Object, part: Slot, result: Result) -> None:
        if result.outcome is Outcome.DONE:
            check = checks[loaded.index] if checks else None
            outcomes[loaded.index] = _take(child, loaded, part, check, result.digest)
        elif result.outcome is Outcome.CORRUPT:
            outcomes[loaded.index] = LoadOutcome.CORRUPT

    def objects() -> Iterator[_Object]:
        for index, (key, buffer) in _that_fit(child, keys, buffers):
            place = child.place_of(buffer) if in_place else None
            start = checks[index].hash_start if checks and place is not None else None
            is_alone = place is None or (bool(checks) and start is None)
            yield _Object(index, key, buffer, place, NO_HASH if start is None else start, is_alone)

    def prepare(_: _Object, part: Slot) -> None:
        with child.ring.view(part) as memory:
            clear_frame(memory)

    try:
        _run(child, Operation.LOAD, objects(), prepare, finish, deadline_seconds)
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
    """Store objects. One that is larger than the ring is rejected, and so is one whose place a folder has.

    Args:
        seals: one per key, which seal the objects before the child writes them; or none.
        in_place: whether the child may move content from buffers in shared memory.

    Raises:
        OSError: the medium or the child failed.
    """
    outcomes = [StoreOutcome.REJECTED] * len(keys)

    def prepare(one: _Object, part: Slot) -> None:
        with child.ring.view(part) as memory:
            write_frame(memory, one.key, len(one.buffer))
        parts = seals[one.index].parts(one.buffer) if seals else [(0, one.buffer)]
        if len(one.buffer):
            for offset, bytes_of_part in parts:  # each is sealed after it
                if one.place is None:
                    child.ring.write(part, HEAD_BYTES + offset, bytes_of_part)

    def finish(stored: _Object, part: Slot, result: Result) -> None:
        if result.outcome is Outcome.DONE:
            outcomes[stored.index] = StoreOutcome.STORED

    def objects() -> Iterator[_Object]:
        for index, (key, buffer) in _that_fit(child, keys, buffers):
            place = child.place_of(buffer) if in_place else None
            yield _Object(index, key, buffer, place, NO_HASH, is_alone=place is None or bool(seals))

    _run(child, Operation.STORE, objects(), prepare, finish, deadline_seconds)
    return outcomes


def _that_fit(
    child: Child, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]
) -> Iterator[tuple[int, tuple[ObjectKey, memoryview]]]:
    for index, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
        if fits(child, len(buffer)):
            yield index, (key, buffer)


def _run(
    child: Child,
    operation: Operation,
    objects: Iterable[_Object],
    prepare: Callable[[_Object, Slot], None],
    finish: Callable[[_Object, Slot, Result], None],
    deadline_seconds: float,
) -> None:
    """Transfer a batch. After an error nothing more begins, and the transfers in progress are awaited.

    Slots of a child that has ended are not given back: their memory goes with the child.

    Args:
        prepare: readies an object and its part of the ring, before the child gets it.
        finish: takes an object after its transfer.
    """
    in_progress: deque[_Request] = deque()

    def finish_first() -> None:
        first = in_progress.popleft()
        answer = child.wait(first.ticket)
        error = None if _answers(answer, operation, first.objects) else child.failure(answer)
        if isinstance(error, ChildError):
            raise error
        try:
            if error is not None:
                raise error
            for (one, part), result in zip(_parts(first.objects, first.slot), answer.results, strict=True):
                finish(one, part, result)
        finally:
            child.ring.release(first.slot)

    try:
        for group in _groups(objects):
            while len(in_progress) > 1 and sum(len(one.objects) for one in in_progress) >= MAX_IN_PROGRESS:
                finish_first()
            nbytes = sum(one.ring_bytes for one in group)
            while (slot := _reserve(child, nbytes, bool(in_progress), deadline_seconds)) is None:
                finish_first()
            in_progress.append(_Request(group, slot, _begin(child, operation, group, slot, prepare)))
        while in_progress:
            finish_first()
    except ChildError:
        for left in in_progress:
            with suppress(ChildError):  # a child that ends by itself first ends the transfers that it has
                child.wait(left.ticket)
        raise
    except BaseException:
        for left in in_progress:
            child.wait(left.ticket)
            child.ring.release(left.slot)
        raise


def _answers(answer: Answer, operation: Operation, objects: Sequence[_Object]) -> bool:
    """Return whether an answer can be that to a request: with a digest where one is wanted, and nowhere else."""
    if answer.outcome is not Outcome.MOVED or len(answer.results) != len(objects):
        return False
    for one, result in zip(objects, answer.results, strict=True):
        is_done = result.outcome is Outcome.DONE
        if bool(result.digest) != (is_done and one.hash_start != NO_HASH):
            return False
        if result.outcome not in (STORE_ENDS if operation is Operation.STORE else LOAD_ENDS):
            return False
    return True


def _groups(objects: Iterable[_Object]) -> Iterator[list[_Object]]:
    """Yield the objects of each request."""
    group: list[_Object] = []
    for one in objects:
        if one.is_alone and group:
            yield group
            group = []
        group.append(one)
        if one.is_alone or len(group) == MAX_GROUP or sum(len(each.buffer) for each in group) >= MAX_GROUP_BYTES:
            yield group
            group = []
    if group:
        yield group


def _reserve(child: Child, nbytes: int, at_once: bool, deadline_seconds: float) -> Slot | None:
    """Return a slot. A caller with objects in progress does not wait: it must end those first."""
    now = time.monotonic()
    slot = child.ring.reserve(nbytes, now if at_once else now + deadline_seconds)
    if slot is None and not at_once:
        child.check()
        raise OSError(errno.ETIMEDOUT, f"no room for {nbytes} bytes for {deadline_seconds:g} s; raise the option ring")
    return slot


def _begin(
    child: Child,
    operation: Operation,
    group: Sequence[_Object],
    slot: Slot,
    prepare: Callable[[_Object, Slot], None],
) -> Ticket:
    try:
        items = []
        for one, part in _parts(group, slot):
            prepare(one, part)
            memory, start = one.place or (RING, 0)
            nbytes = len(one.buffer) + OVERHEAD_BYTES
            items.append(Item(name_of(one.key), part.offset, nbytes, memory, start, one.hash_start))
        return child.send(operation, items=tuple(items))
    except ChildError:
        raise
    except BaseException:
        child.ring.release(slot)  # the child never heard of it
        raise


def _take(child: Child, loaded: _Object, part: Slot, check: LoadCheck | None, digest: bytes) -> LoadOutcome:
    """Check an object that has arrived, and copy it out of the ring if it is there."""
    if check is not None and digest and check.hashed(digest):
        return LoadOutcome.HIT  # whole and of its name, by its own header
    with child.ring.view(part) as memory:
        if not is_whole(memory, loaded.key, len(loaded.buffer)):
            return LoadOutcome.CORRUPT
    if loaded.place is not None and (check is None or digest):
        return LoadOutcome.HIT
    step = len(loaded.buffer) if check is None else CHECK_BYTES
    for start in range(0, len(loaded.buffer), step or 1):
        bytes_of_part = loaded.buffer[start : start + step]
        if loaded.place is None:
            child.ring.read(part, HEAD_BYTES + start, bytes_of_part)
        if check is not None:
            check.filled(len(bytes_of_part))
    return LoadOutcome.HIT
