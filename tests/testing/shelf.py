"""A correct bounded backend, shared and persistent among those of one process; tests break it in single places."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from pydantic import Field

from offload_core.api.backend import (
    Backend,
    BackendContext,
    LoadOutcome,
    LoadReservation,
    StoredObject,
    StoreOutcome,
    StoreReservation,
)
from offload_core.api.capabilities import Capabilities
from offload_core.api.keys import ObjectKey
from offload_core.api.options import BackendOptions


class ShelfOptions(BackendOptions):
    """Options of the shelf."""

    name: str = Field(description="name of the shelf")
    capacity: int = Field(description="limit in bytes")


@dataclass
class Shelf:
    """A medium: objects, oldest first, their pins, the spare ones, and the capacity that is promised."""

    objects: dict[ObjectKey, bytes] = field(default_factory=dict)
    spare: set[ObjectKey] = field(default_factory=set)
    pins: dict[ObjectKey, int] = field(default_factory=dict)
    promised: dict[int, int] = field(default_factory=dict)

    @property
    def used(self) -> int:
        return sum(map(len, self.objects.values())) + sum(self.promised.values())


SHELVES: dict[str, Shelf] = {}


class Pinned(LoadReservation):
    def __init__(self, backend: ShelfBackend, keys: Sequence[ObjectKey], present: Sequence[bool]) -> None:
        super().__init__(present)
        self._backend = backend
        self._pinned = [key for key, there in zip(keys, present, strict=True) if there]

    async def release(self) -> None:
        self._backend.unpin(self._pinned)


class Promised(StoreReservation):
    def __init__(
        self,
        backend: ShelfBackend,
        outcomes: Sequence[StoreOutcome | None],
        evicted: Sequence[ObjectKey],
        granted: dict[ObjectKey, list[int]],
    ) -> None:
        super().__init__(outcomes, evicted)
        self._backend = backend
        self._granted = granted

    async def release(self) -> None:
        self._backend.give_back(self._granted)


class ShelfBackend(Backend[ShelfOptions]):
    """Every step that takes time on a medium is a call on a thread here, so that operations interleave."""

    capabilities = Capabilities(medium="host", persistent=True, shared=True, bounded=True, lists=True, spares=True)

    def __init__(self, options: ShelfOptions, context: BackendContext) -> None:
        super().__init__(options, context)
        self._numbers = itertools.count()
        self._mine: dict[ObjectKey, list[int]] = {}

    @property
    def shelf(self) -> Shelf:
        return SHELVES.setdefault(self.options.name, Shelf())

    def name_of(self, key: ObjectKey) -> ObjectKey:
        return key

    async def pause(self) -> None:
        await self.run_blocking(lambda: None)

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        await self.pause()
        return [self.name_of(key) in self.shelf.objects for key in keys]

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        await self.pause()
        return await self.run_blocking(lambda: list(map(self._load, keys, buffers)))

    def _load(self, key: ObjectKey, buffer: memoryview) -> LoadOutcome:
        found = self.shelf.objects.get(self.name_of(key))
        if found is None:
            return LoadOutcome.MISS
        if len(found) != len(buffer):
            return LoadOutcome.CORRUPT
        buffer[:] = found
        self.shelf.spare.discard(self.name_of(key))
        return LoadOutcome.HIT

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        whole = await self.run_blocking(lambda: [bytes(buffer) for buffer in buffers])
        await self.pause()
        return list(map(self.put, keys, whole))

    def put(self, key: ObjectKey, data: bytes) -> StoreOutcome:
        name = self.name_of(key)
        if name in self.shelf.objects:  # another client was faster; its own promise counts
            return StoreOutcome.ALREADY_PRESENT
        promised = self.shelf.promised
        own = [number for number in self._mine.pop(name, []) if number in promised]
        used = next((number for number in own if promised[number] == len(data)), None)
        self._mine[name] = [number for number in own if number != used]
        if used is None and self.shelf.used + len(data) > self.options.capacity:
            return StoreOutcome.REJECTED
        if used is not None:
            del promised[used]
        self.shelf.objects[name] = data
        return StoreOutcome.STORED

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        await self.pause()
        for key in keys:
            self.shelf.objects.pop(self.name_of(key), None)

    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        await self.pause()
        present = [self.name_of(key) in self.shelf.objects for key in keys]
        for key, there in zip(keys, present, strict=True):
            if there:
                self.shelf.pins[key] = self.shelf.pins.get(key, 0) + 1
        return Pinned(self, keys, present)

    def unpin(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            self.shelf.pins[key] -= 1

    async def prepare_store(
        self, keys: Sequence[ObjectKey], nbytes: Sequence[int], spare: Sequence[bool] = ()
    ) -> StoreReservation:
        await self.pause()
        evicted: list[ObjectKey] = []
        granted: dict[ObjectKey, list[int]] = {}
        flags = spare or [False] * len(keys)
        outcomes = [
            self._promise(key, size, is_spare, evicted, granted)
            for key, size, is_spare in zip(keys, nbytes, flags, strict=True)
        ]
        return Promised(self, outcomes, evicted, granted)

    def _promise(
        self, key: ObjectKey, size: int, spare: bool, evicted: list[ObjectKey], granted: dict[ObjectKey, list[int]]
    ) -> StoreOutcome | None:
        name = self.name_of(key)
        if name in self.shelf.objects:
            return StoreOutcome.ALREADY_PRESENT
        for old in [] if spare else sorted(self.shelf.objects, key=lambda one: one not in self.shelf.spare):
            if self.shelf.used + size <= self.options.capacity:
                break
            if not self.is_pinned(old):
                del self.shelf.objects[old]
                evicted.append(old)
        if self.shelf.used + size > self.options.capacity:
            return StoreOutcome.REJECTED
        (self.shelf.spare.add if spare else self.shelf.spare.discard)(name)
        number = next(self._numbers) + id(self)
        self.shelf.promised[number] = size
        self._mine.setdefault(name, []).append(number)
        granted.setdefault(name, []).append(number)
        return None

    async def touch(self, keys: Sequence[ObjectKey], spare: Sequence[bool]) -> None:
        await self.pause()
        for key, is_spare in zip(map(self.name_of, keys), spare, strict=True):
            if key in self.shelf.objects:
                self.shelf.objects[key] = self.shelf.objects.pop(key)
                (self.shelf.spare.add if is_spare else self.shelf.spare.discard)(key)

    def is_pinned(self, key: ObjectKey) -> bool:
        return self.shelf.pins.get(key, 0) > 0

    def give_back(self, granted: dict[ObjectKey, list[int]]) -> None:
        for numbers in granted.values():
            for number in numbers:
                self.shelf.promised.pop(number, None)

    async def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        await self.pause()
        yield [StoredObject(key, len(data), 0.0) for key, data in list(self.shelf.objects.items())]
