"""The state machine passes correct backends, and finds broken ones with the clause and the steps."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from offload_backend_disk.plugin import offload_register_backends

from offload_core.api.backend import (
    BackendContext,
    BackendType,
    LoadOutcome,
    LoadReservation,
    StoreOutcome,
    StoreReservation,
)
from offload_core.api.capabilities import Capabilities
from offload_core.api.keys import ObjectKey
from offload_core.api.one_pass import LoadCheck, StoreSeal
from offload_core.testing.state_machine.machine import CAPACITY_BYTES, STATE_MACHINE_SETTINGS, check_with_state_machine
from tests.testing.contract.reference import MEDIA, REFERENCE
from tests.testing.shelf import SHELVES, Promised, ShelfBackend, ShelfOptions

ALWAYS_THE_SAME = hypothesis.settings(
    STATE_MACHINE_SETTINGS, derandomize=True, database=None, max_examples=1000, phases=[hypothesis.Phase.generate]
)
"""Settings that find a failure but do not shrink its steps, which takes longer."""

SOME = hypothesis.settings(ALWAYS_THE_SAME, max_examples=60)

_numbers = itertools.count()


def check(backend: type[ShelfBackend], settings: hypothesis.settings = ALWAYS_THE_SAME) -> None:
    name = f"shelf {next(_numbers)}"
    bounded = backend.capabilities.bounded
    try:
        options = {"name": name, "capacity": CAPACITY_BYTES if bounded else 1 << 40}
        check_with_state_machine(
            BackendType("shelf", backend, ShelfOptions),
            options,
            capacity_bytes=CAPACITY_BYTES if bounded else None,
            settings=settings,
        )
    finally:
        SHELVES.pop(name, None)


class Unbounded(ShelfBackend):
    capabilities = Capabilities(medium="host", persistent=True, shared=True, lists=True)


class InOneProcess(ShelfBackend):
    """Neither shared nor persistent, unbounded, lists nothing."""

    capabilities = Capabilities(medium="host", persistent=False, shared=False)

    async def open(self) -> None:
        SHELVES.pop(self.options.name, None)


@pytest.mark.parametrize(
    "backend", [ShelfBackend, *(pytest.param(one, marks=pytest.mark.long) for one in (Unbounded, InOneProcess))]
)
def test_the_machine_passes_a_correct_backend(backend: type[ShelfBackend]) -> None:
    check(backend, SOME)


def test_the_machine_passes_the_contracts_reference_backend() -> None:
    check_with_state_machine(
        REFERENCE, {"medium": "machine", "capacity": CAPACITY_BYTES}, capacity_bytes=CAPACITY_BYTES, settings=SOME
    )
    assert not MEDIA.pop("machine").objects


@pytest.mark.long  # the disk backend's own tests run it too
def test_the_machine_passes_the_disk(tmp_path: Path) -> None:
    (disk,) = offload_register_backends()
    check_with_state_machine(disk, {"path": tmp_path / "objects"}, settings=SOME)
    assert not list(tmp_path.rglob("*.kv")), "every example deletes its objects"


class LosesUpdates(Unbounded):
    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        copy = dict(self.shelf.objects)
        await self.pause()
        self.shelf.objects = copy | dict(zip(keys, map(bytes, buffers), strict=True))
        return [StoreOutcome.STORED] * len(keys)


class IgnoresThePack(Unbounded):
    def name_of(self, key: ObjectKey) -> ObjectKey:
        return key._replace(pack="")


class CutsTheHash(Unbounded):
    def name_of(self, key: ObjectKey) -> ObjectKey:
        return key._replace(chunk_hash=key.chunk_hash[:32])


class FindsWhatWasDeleted(Unbounded):
    """Keeps a copy of loaded objects, and forgets to delete the copy."""

    def _load(self, key: ObjectKey, buffer: memoryview) -> LoadOutcome:
        copies = self.__dict__.setdefault("copies", {})
        if key in copies:
            self.shelf.objects.setdefault(key, copies[key])
        outcome = super()._load(key, buffer)
        if outcome is LoadOutcome.HIT:
            copies[key] = bytes(buffer)
        return outcome


class Tears(Unbounded):
    """Writes in place, in two halves."""

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        for key, buffer in zip(keys, buffers, strict=True):
            half = len(buffer) // 2
            self.shelf.objects[key] = bytes(buffer[:half]) + bytes(len(buffer) - half)
            await self.pause()
            rest = self.shelf.objects.get(key, b"")[:half]
            self.shelf.objects[key] = rest + bytes(buffer[half:])
        return [StoreOutcome.STORED] * len(keys)


class TearsWhenCancelled(Unbounded):
    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        for key, buffer in zip(keys, buffers, strict=True):
            self.shelf.objects.setdefault(key, bytes(len(buffer)))
        await self.pause()
        for key in keys:
            del self.shelf.objects[key]
        return await super().store(keys, buffers)


class IgnoresPins(ShelfBackend):
    def is_pinned(self, key: ObjectKey) -> bool:
        return False


class LeaksCapacity(ShelfBackend):
    def give_back(self, granted: dict[ObjectKey, list[int]]) -> None:
        if len(granted) < 2:
            super().give_back(granted)


class LeaksPins(ShelfBackend):
    def unpin(self, keys: Sequence[ObjectKey]) -> None:
        super().unpin(keys[:1])


class LeaksCapacityWhenCancelled(ShelfBackend):
    async def prepare_store(
        self, keys: Sequence[ObjectKey], nbytes: Sequence[int], spare: Sequence[bool] = ()
    ) -> StoreReservation:
        reservation = await super().prepare_store(keys, nbytes, spare)
        await self.pause()
        return reservation


class LeaksPinsInOneCall(ShelfBackend):
    loads_in_one_call = True

    async def load_and_check(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], checks: Sequence[LoadCheck]
    ) -> list[LoadOutcome]:
        await self.prepare_load(keys)
        return await self.load_into(keys, buffers)


class SealsInPlace(Unbounded):
    """Stores an object, and then seals it."""

    seals_stores = True

    async def store_and_seal(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], seals: Sequence[StoreSeal]
    ) -> list[StoreOutcome]:
        outcomes = await self.store(keys, buffers)
        await self.pause()
        for key, buffer, seal in zip(keys, buffers, seals, strict=True):
            seal.seal()
            self.shelf.objects[key] = bytes(buffer)
        return outcomes


class PromisesTooMuch(ShelfBackend):
    async def prepare_store(
        self, keys: Sequence[ObjectKey], nbytes: Sequence[int], spare: Sequence[bool] = ()
    ) -> StoreReservation:
        full = self.shelf.used >= self.options.capacity
        return Promised(self, [StoreOutcome.REJECTED if full else None] * len(keys), [], {})


class HidesEvictions(ShelfBackend):
    capabilities = Capabilities(medium="host", persistent=True, shared=False, bounded=True, lists=True, spares=True)

    async def prepare_store(
        self, keys: Sequence[ObjectKey], nbytes: Sequence[int], spare: Sequence[bool] = ()
    ) -> StoreReservation:
        reservation = await super().prepare_store(keys, nbytes, spare)
        reservation.evicted = ()
        return reservation


class EvictsForSpareObjects(ShelfBackend):
    async def prepare_store(
        self, keys: Sequence[ObjectKey], nbytes: Sequence[int], spare: Sequence[bool] = ()
    ) -> StoreReservation:
        return await super().prepare_store(keys, nbytes)


class TouchesPresentObjectsOnly(ShelfBackend):
    async def touch(self, keys: Sequence[ObjectKey], spare: Sequence[bool]) -> None:
        for key in keys:
            self.shelf.objects[key]


class RemovesWhatBecomesSpare(ShelfBackend):
    async def touch(self, keys: Sequence[ObjectKey], spare: Sequence[bool]) -> None:
        for key, is_spare in zip(keys, spare, strict=True):
            if is_spare:
                self.shelf.objects.pop(key, None)


class MakesWhatItTouches(ShelfBackend):
    async def touch(self, keys: Sequence[ObjectKey], spare: Sequence[bool]) -> None:
        for key in keys:
            self.shelf.objects.setdefault(key, b"")


class LeavesAFileOpen(Unbounded):
    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        await super().delete(keys)
        LEFT.append(os.open(os.devnull, os.O_RDONLY))


class LeavesAThreadRunning(Unbounded):
    async def close(self) -> None:
        await super().close()
        threading.Thread(target=THREADS_MAY_END.wait, name="keeper", daemon=True).start()


LEFT: list[int] = []
THREADS_MAY_END = threading.Event()


class AnswersOutOfOrder(Unbounded):
    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        return sorted(await super().load_into(keys, buffers), key=lambda outcome: outcome.value)


class AnswersOncePerKey(Unbounded):
    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return await super().contains(list(dict.fromkeys(keys)))


class KeepsTheBuffer(Unbounded):
    """Stores a view in place of a copy."""

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        self.shelf.objects.update(zip(keys, buffers, strict=True))  # type: ignore[arg-type]
        return [StoreOutcome.STORED] * len(keys)


class WritesAfterCancellation(Unbounded):
    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        loading = self.context.executor.submit(lambda: list(map(self._load, keys, buffers)))
        return await asyncio.wrap_future(loading)


class ClearsTheBufferOfAMiss(Unbounded):
    def _load(self, key: ObjectKey, buffer: memoryview) -> LoadOutcome:
        if self.name_of(key) not in self.shelf.objects:
            buffer[:] = bytes(len(buffer))
        return super()._load(key, buffer)


class HitsWithAPrefix(Unbounded):
    def _load(self, key: ObjectKey, buffer: memoryview) -> LoadOutcome:
        found = self.shelf.objects.get(key)
        if found is None or len(found) <= len(buffer):
            return super()._load(key, buffer)
        buffer[:] = found[: len(buffer)]
        return LoadOutcome.HIT


class ListsTwice(Unbounded):
    async def list_objects(self) -> Any:
        async for batch in super().list_objects():
            yield batch
            yield batch[1:2]


class ForgetsOnClose(Unbounded):
    async def close(self) -> None:
        for key in list(self.shelf.objects)[2:]:
            del self.shelf.objects[key]


class ClosesOnce(Unbounded):
    async def close(self) -> None:
        if self.__dict__.setdefault("closed", False):
            raise RuntimeError("closed already")
        self.__dict__["closed"] = True


class FailsToDeleteTheAbsent(Unbounded):
    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            del self.shelf.objects[key]


class FindsNothingWhenPreparing(Unbounded):
    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        return LoadReservation([bool(index) for index in range(len(keys))])


long = pytest.mark.long  # broken backends that take the machine over a second to find, if others are like them

BROKEN = [
    (LosesUpdates, "C5|C18|C2"),  # a lost deletion may be noticed by the next store
    (IgnoresThePack, "C1|C2|C6|C12|C16|C18"),
    (CutsTheHash, "C1|C2|C6|C12|C16|C18"),
    (FindsWhatWasDeleted, "C1|C12|C16"),
    (Tears, "C1|C6"),
    (TearsWhenCancelled, "C6|C1|C12|C18|C2"),
    pytest.param(IgnoresPins, "C9|C5|C11", marks=long),  # what vanished may be noticed at each of these places
    (LeaksCapacity, "C10|C5"),
    (LeaksPins, "C10"),
    (LeaksCapacityWhenCancelled, "C10|C5"),
    (LeaksPinsInOneCall, "C10"),
    pytest.param(SealsInPlace, "C1|C6|C12|C18", marks=long),
    (PromisesTooMuch, "C11"),
    (HidesEvictions, "C11"),
    pytest.param(EvictsForSpareObjects, "C5", marks=long),
    (TouchesPresentObjectsOnly, "C21"),
    pytest.param(RemovesWhatBecomesSpare, "C5|C9|C18", marks=long),
    (MakesWhatItTouches, "C1|C2|C12|C16|C18|C19"),
    (AnswersOutOfOrder, "C1|C3|C5|C6|C16"),
    (AnswersOncePerKey, "C2"),
    (KeepsTheBuffer, "C1|C6"),
    pytest.param(WritesAfterCancellation, "C7", marks=long),
    (ClearsTheBufferOfAMiss, "C3"),
    (HitsWithAPrefix, "C1|C6"),
    (ListsTwice, "C18"),
    pytest.param(ForgetsOnClose, "C5|C18", marks=long),
    (ClosesOnce, "C13"),
    (FailsToDeleteTheAbsent, "C12"),
    (FindsNothingWhenPreparing, "C5"),
]


@pytest.mark.parametrize(("backend", "clauses"), BROKEN, ids=lambda value: getattr(value, "__name__", value))
def test_the_machine_finds_a_broken_backend(backend: type[ShelfBackend], clauses: str) -> None:
    with pytest.raises(AssertionError) as caught:
        check(backend)
    message = str(caught.value)
    assert re.match(rf"({clauses}): ", message), message
    assert "\nsteps:\n  1. open client 0" in message
    assert "\nkeys:\n  k0 = " in message


@pytest.mark.parametrize(
    ("backend", "call"),
    [
        (LeaksCapacity, "store k"),
        (LeaksPins, "load k"),
        (LeaksCapacityWhenCancelled, "cancelled after"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_machine_names_the_call_that_leaks_capacity(backend: type[ShelfBackend], call: str) -> None:
    with pytest.raises(AssertionError, match=r"^C10: (step|one of the steps) \d+") as caught:
        check(backend)
    message = str(caught.value)
    first, last = re.findall(r"^C10: (?:step|one of the steps) (\d+)(?: to (\d+)|:)", message)[0]
    steps = message.partition("steps:")[2].splitlines()[int(first) : int(last or first) + 1]
    assert any(call in step for step in steps), message


@pytest.mark.parametrize(
    ("backend", "leak"),
    [
        (LeavesAFileOpen, r"file descriptor \d+ \(/dev/null\) is of step \d+: .*delete"),
        (LeavesAThreadRunning, r"thread keeper is of step \d+: close client 0"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_machine_names_the_call_that_leaves_something_open(backend: type[ShelfBackend], leak: str) -> None:
    THREADS_MAY_END.clear()
    try:
        with pytest.raises(AssertionError, match=rf"^C13: all clients are closed, and \d+ threads .* left; {leak}"):
            check(backend)
    finally:
        THREADS_MAY_END.set()
        while LEFT:
            os.close(LEFT.pop())


EVICTS = Capabilities(medium="remote", persistent=True, shared=True, lists=True, evicts=True)


class EvictsByItself(Unbounded):
    """Loses an object now and then, and rejects some of the stores that it has granted."""

    capabilities = EVICTS

    def __init__(self, options: ShelfOptions, context: BackendContext) -> None:
        super().__init__(options, context)
        self.calls = itertools.count()

    async def pause(self) -> None:
        await super().pause()
        objects = self.shelf.objects
        if objects and next(self.calls) % 9 == 0:
            del objects[next(iter(objects))]

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        outcomes = await super().store(keys[1:], buffers[1:])
        if not keys:
            return outcomes
        if next(self.calls) % 5 == 0:
            return [StoreOutcome.REJECTED, *outcomes]
        return [*await super().store(keys[:1], buffers[:1]), *outcomes]


class EvictsEverything(EvictsByItself):
    async def pause(self) -> None:
        await super().pause()
        self.shelf.objects.clear()


def test_the_machine_passes_a_medium_that_evicts_by_itself() -> None:
    check(EvictsByItself, SOME)


@pytest.mark.long
def test_a_medium_that_evicts_by_itself_must_keep_some_objects() -> None:
    with pytest.raises(AssertionError, match=r"^C5: of \d+ lookups and loads of stored objects, \d+ found"):
        check(EvictsEverything, SOME)


def test_a_medium_may_evict_by_itself_only_if_it_says_so() -> None:
    class Silent(EvictsByItself):
        capabilities = Unbounded.capabilities

    with pytest.raises(AssertionError, match=r"^(C5|C11|C18): "):
        check(Silent)


@pytest.mark.parametrize(
    ("backend", "clauses"),
    [
        pytest.param(IgnoresThePack, "C1|C2|C6|C12|C16|C18", marks=long),
        pytest.param(FindsWhatWasDeleted, "C1|C12|C16|C18", marks=long),
        pytest.param(Tears, "C1|C6", marks=long),
        pytest.param(AnswersOncePerKey, "C2", marks=long),
        (KeepsTheBuffer, "C1|C6"),
        pytest.param(WritesAfterCancellation, "C7", marks=long),
        (ClearsTheBufferOfAMiss, "C3"),
        (HitsWithAPrefix, "C1|C6"),
        (ListsTwice, "C18"),
        (FailsToDeleteTheAbsent, "C12"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_machine_finds_a_broken_backend_whose_medium_evicts(backend: type[ShelfBackend], clauses: str) -> None:
    broken = type(backend.__name__, (backend,), {"capabilities": EVICTS})
    with pytest.raises(AssertionError, match=rf"^({clauses}): "):
        check(broken)
