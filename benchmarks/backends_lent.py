"""Contender of ``benchmarks/backends.py``: a tier in the I/O process that lends its memory, as engines use ``cpu``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from benchmarks.backends_process import OurProcess
from benchmarks.backends_rig import Memory
from offload_core.api.backend import LoadOutcome
from offload_core.memory.block_copier import COPY_BYTES
from offload_core.objects.arriving_object import ArrivingObject
from offload_core.objects.departing_object import DepartingObject
from offload_core.objects.format import HEADER_BYTES
from offload_core.tiers.calls.lent_objects import LendingEnd, LentObject, WantedObject
from offload_core.tiers.staged_object import StagedObject
from offload_core.transfer.call_size import CallSize

_Copy = Callable[[], None]


class OurLentMemory(OurProcess):
    """A tier whose memory is copied to and from directly, without staging memory.

    As on a CPU engine, each part of an object is hashed right after its copy, on the thread that copies.
    One thread sends the calls and takes their ends, as the engine's does. As many threads as the tier has copy; one
    thread does both.
    """

    def __init__(self, name: str, memory: Memory, chunks: int, payload_bytes: int, backend: dict[str, Any]) -> None:
        super().__init__(name, memory, chunks, payload_bytes, backend)
        self._copiers = ThreadPoolExecutor(self._threads) if self._threads > 1 else None
        self._copying: deque[tuple[Future[None], Callable[[], None]]] = deque()

    def _store_objects(self, objects: list[StagedObject]) -> None:
        """Reserve lent memory, fill it, and store it where it is."""

        def store(batch: list[StagedObject], lent: list[LentObject], done: Callable[[], None]) -> None:
            filled = [StagedObject(one.key, at) for one, at in zip(batch, lent, strict=True)]

            def ended(stored: Sequence[bool]) -> None:
                if not all(stored):
                    raise SystemExit(f"{self.name}: the tier did not store some objects")
                _release(lent)
                done()

            if not self._tier.start_store(filled, ended):
                raise SystemExit(f"{self.name}: the tier refused a call")

        def reserved(batch: list[StagedObject], lent: list[LentObject], done: Callable[[], None]) -> None:
            copies = [partial(_copy_and_seal, at.view, one) for one, at in zip(batch, lent, strict=True)]
            self._copy(copies, partial(store, batch, lent, done))

        self._run_all(self._tier.lending.start_reserve, objects, None, self._store_size, reserved)

    def _load_objects(self, objects: list[StagedObject]) -> None:
        """Borrow objects, copy them, and give them back."""

        def borrowed(batch: list[StagedObject], lent: list[LentObject], done: Callable[[], None]) -> None:
            def copied() -> None:
                _release(lent)
                done()

            self._copy([partial(_copy_and_verify, one, at.view) for one, at in zip(batch, lent, strict=True)], copied)

        start = partial(self._tier.lending.start_borrow, verify=False)
        self._run_all(start, objects, LoadOutcome.HIT, self._load_size, borrowed)

    def _run_all(
        self,
        start: Callable[[list[WantedObject], Callable[[LendingEnd[Any] | None], None]], bool],
        objects: list[StagedObject],
        wanted: LoadOutcome | None,
        size: CallSize,
        go_on: Callable[[list[StagedObject], list[LentObject], Callable[[], None]], None],
    ) -> None:
        """Ask for the memory of all objects, as many calls at once as the engine makes, and go on with each answer.

        Args:
            wanted: the outcome of each object for which memory is lent.
            size: how many batches a call takes.
        """
        left = deque(self._batches(objects))
        fair = -(-len(left) // 2)
        running, unfinished = 0, len(objects)

        def done(count: int) -> None:
            nonlocal unfinished
            unfinished -= count

        def lent(batch: list[StagedObject], count: int, started: float, end: LendingEnd[Any] | None) -> None:
            nonlocal running
            running -= 1
            size.ended(count, time.monotonic() - started, worked=True)
            at = [] if end is None else [one for one in end.lent if one is not None]
            if end is None or set(end.outcomes) != {wanted} or len(at) != len(batch):
                raise SystemExit(f"{self.name}: the tier did not lend memory: {end}")
            go_on(batch, at, partial(done, len(batch)))

        while unfinished:
            while left and running < self._load_slots.slots:
                count = size.take((sum(one.lease.nbytes for one in batch) for batch in left), fair)
                call = [staged for _ in range(count) for staged in left.popleft()]
                asked = [WantedObject(staged.key, staged.nbytes) for staged in call]
                running += 1
                if not start(asked, partial(lent, call, count, time.monotonic())):
                    raise SystemExit(f"{self.name}: the tier refused a call")
            self._processes.receive()
            self._end_copies()
            if unfinished and not (left and running < self._load_slots.slots):
                self._wait()

    def _copy(self, copies: Sequence[_Copy], then: Callable[[], None]) -> None:
        """Copy now, or divide the copies among the threads that copy."""
        if self._copiers is None:
            for copy in copies:
                copy()
            then()
            return
        left = len(copies)

        def one_ended() -> None:
            nonlocal left
            left -= 1
            if not left:
                then()

        self._copying += [(self._copiers.submit(copy), one_ended) for copy in copies]

    def _end_copies(self) -> None:
        while self._copying and self._copying[0][0].done():
            self._copying.popleft()[1]()

    def _wait(self) -> None:
        if self._copying:
            self._copying[0][0].result()
        else:
            self._processes.wait(1.0)

    def close(self) -> None:
        super().close()
        if self._copiers is not None:
            self._copiers.shutdown()


def _copy_and_seal(target: memoryview, staged: StagedObject) -> None:
    seal = DepartingObject(target, staged.key)
    for nbytes in _copied_parts(target, staged.lease.view):
        seal.stored(nbytes)
    seal.seal()


def _copy_and_verify(staged: StagedObject, source: memoryview) -> None:
    check = ArrivingObject(source, staged.key)
    check.filled(HEADER_BYTES)
    for nbytes in _copied_parts(staged.lease.view, source):
        check.filled(nbytes)
    if not check.passed:
        raise SystemExit(f"{staged.key} is damaged in lent memory")


def _copied_parts(target: memoryview, source: memoryview) -> Iterator[int]:
    """Copy a payload part by part, and yield the bytes of each part."""
    to, of = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    for start in range(HEADER_BYTES, len(to), COPY_BYTES):
        part = to[start : start + COPY_BYTES]
        np.copyto(part, of[start : start + COPY_BYTES])
        yield len(part)


def _release(lent: list[LentObject]) -> None:
    for one in lent:
        one.release()
