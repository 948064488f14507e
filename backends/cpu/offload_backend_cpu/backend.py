"""The ``cpu`` backend: host memory of the worker process.

Everything but the copies happens on the event loop, so nothing here needs a lock. An object's pages are *reserved* from
:meth:`CpuBackend.prepare_store` on, become visible when they are filled, and are given back when the object was evicted
or deleted and no load uses them any more.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from pydantic import Field

from offload_backend_cpu.arena import PAGE_BYTES, Arena, Pages
from offload_core.backend import (
    Backend,
    BackendContext,
    BackendOptions,
    Capabilities,
    LoadOutcome,
    LoadReservation,
    StoredObject,
    StoreOutcome,
    StoreReservation,
)
from offload_core.errors import BackendError
from offload_core.keys import ObjectKey
from offload_core.quantities import Bytes

_LIST_BATCH = 1000


class CpuOptions(BackendOptions):
    """Options of the ``cpu`` type."""

    capacity: Bytes = Field(ge=PAGE_BYTES, description="host memory for objects, of each worker process")


@dataclass(eq=False)
class _Object:
    """An object's memory. ``pins`` counts the loads that use or await it."""

    pages: Pages
    nbytes: int
    pins: int = 0
    gone: bool = False
    """Evicted or deleted: its pages are given back with the last pin."""
    stored_at_seconds: float = field(default_factory=time.time)


class CpuBackend(Backend[CpuOptions]):
    """Objects in host memory, the least recently used evicted first."""

    def __init__(self, options: CpuOptions, context: BackendContext) -> None:
        super().__init__(options, context)
        self._arena: Arena | None = None
        self._objects: OrderedDict[ObjectKey, _Object] = OrderedDict()  # least recently used first
        self._reserved: dict[ObjectKey, list[_Object]] = {}
        self._evictable_pages = 0

    @property
    def capabilities(self) -> Capabilities:
        """Memory of this process."""
        return Capabilities(medium="host", persistent=False, shared=False, bounded=True, lists=True, sizes=True)

    async def open(self) -> None:
        """Set the memory aside; the system gives it as it is filled."""
        self._arena = Arena(self.options.capacity)

    async def close(self) -> None:
        """Wait for running copies and let go of the memory."""
        await super().close()
        self._objects.clear()
        self._arena = None

    async def contains(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        """See :meth:`Backend.contains`."""
        return [key in self._objects for key in keys]

    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        """Pin what is there."""
        found = [self._objects.get(key) for key in keys]
        pinned = [held for held in found if held is not None]
        for key, held in zip(keys, found, strict=True):
            if held is not None:
                self._objects.move_to_end(key)
                self._pin(held)

        async def release() -> None:
            self._unpin_all(pinned)

        sizes = [None if held is None else held.nbytes for held in found]
        return LoadReservation([held is not None for held in found], release, sizes)

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        """See :meth:`Backend.load_into`. When it is cancelled it ends with its copies."""
        outcomes: list[LoadOutcome] = []
        copies: list[tuple[Pages, memoryview]] = []
        pinned: list[_Object] = []
        for key, buffer in zip(keys, buffers, strict=True):
            held = self._objects.get(key)
            if held is None:
                outcomes.append(LoadOutcome.MISS)
            elif held.nbytes != len(buffer):
                outcomes.append(LoadOutcome.CORRUPT)
            else:
                outcomes.append(LoadOutcome.HIT)
                copies.append((held.pages, buffer))
                pinned.append(held)
                self._pin(held)
        try:
            await self._copy(self._memory.read, copies)
        finally:
            self._unpin_all(pinned)
        return outcomes

    async def prepare_store(self, keys: Sequence[ObjectKey], nbytes: Sequence[int]) -> StoreReservation:
        """Reserve pages, evicting what was not used for longest; what is larger than all that could go is rejected."""
        outcomes: list[StoreOutcome | None] = []
        evicted: list[ObjectKey] = []
        taken: list[tuple[ObjectKey, _Object]] = []
        for key, size in zip(keys, nbytes, strict=True):
            if key in self._objects:
                self._objects.move_to_end(key)
                outcomes.append(StoreOutcome.ALREADY_PRESENT)
                continue
            reserved = self._reserve(size, evicted)
            if reserved is not None:
                self._reserved.setdefault(key, []).append(reserved)
                taken.append((key, reserved))
            outcomes.append(None if reserved is not None else StoreOutcome.REJECTED)

        async def release() -> None:
            for key, reserved in taken:
                if reserved in self._reserved.get(key, ()):
                    self._take_reserved(key, reserved)
                    self._free(reserved.pages)

        return StoreReservation(outcomes, evicted, release)

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        """See :meth:`Backend.store`. When it is cancelled it ends with its copies, and nothing is stored."""
        outcomes: list[StoreOutcome] = []
        filling: list[tuple[ObjectKey, _Object]] = []
        copies: list[tuple[Pages, memoryview]] = []
        for key, buffer in zip(keys, buffers, strict=True):
            if key in self._objects:
                outcomes.append(StoreOutcome.ALREADY_PRESENT)
                continue
            held = next((r for r in self._reserved.get(key, ()) if r.nbytes == len(buffer)), None)
            if held is not None:
                self._take_reserved(key, held)
            elif self._memory.pages_for(len(buffer)) <= self._memory.free_pages:  # eviction is for prepare_store
                held = self._reserve(len(buffer), [])
            if held is None:
                outcomes.append(StoreOutcome.REJECTED)
                continue
            outcomes.append(StoreOutcome.STORED)
            filling.append((key, held))
            copies.append((held.pages, buffer))
        try:
            await self._copy(self._memory.write, copies)
        except BaseException:
            for _, held in filling:
                self._free(held.pages)
            raise
        for key, held in filling:
            if key in self._objects:  # the same key twice, or another call was faster
                self._free(held.pages)
            else:
                self._objects[key] = held
                self._evictable_pages += len(held.pages)
        return outcomes

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        """See :meth:`Backend.delete`."""
        for key in keys:
            if key in self._objects:
                self._forget(key)

    async def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        """See :meth:`Backend.list_objects`."""
        listed = [StoredObject(key, held.nbytes, held.stored_at_seconds) for key, held in self._objects.items()]
        for start in range(0, len(listed), _LIST_BATCH):
            yield listed[start : start + _LIST_BATCH]

    @property
    def _memory(self) -> Arena:
        if self._arena is None:
            raise BackendError(f"tier {self.context.name!r} is not open")
        return self._arena

    async def _copy(self, copy: Callable[[Pages, memoryview], None], batch: Sequence[tuple[Pages, memoryview]]) -> None:
        """Run a batch's copies on one of the tier's threads."""
        if batch:
            await self.run_blocking(_copy_all, copy, batch)

    def _reserve(self, nbytes: int, evicted: list[ObjectKey]) -> _Object | None:
        """Take pages for an object, evicting others (added to ``evicted``) where enough of them could go."""
        needed = self._memory.pages_for(nbytes)
        if needed > self._memory.free_pages + self._evictable_pages:
            return None
        while self._memory.free_pages < needed:
            victim = next(key for key, held in self._objects.items() if not held.pins)  # pinned ones are few and recent
            self._forget(victim)
            evicted.append(victim)
        return _Object(self._memory.take(needed), nbytes)

    def _take_reserved(self, key: ObjectKey, reserved: _Object) -> None:
        """End a reservation; its pages are the caller's now."""
        self._reserved[key].remove(reserved)
        if not self._reserved[key]:
            del self._reserved[key]

    def _forget(self, key: ObjectKey) -> None:
        """Make an object invisible; its pages are free at once, or when the last load that uses them has ended."""
        held = self._objects.pop(key)
        held.gone = True
        if not held.pins:
            self._evictable_pages -= len(held.pages)
            self._free(held.pages)

    def _free(self, pages: Pages) -> None:
        if self._arena is not None:  # else all of it has gone with close()
            self._arena.give_back(pages)

    def _pin(self, held: _Object) -> None:
        if not held.pins:
            self._evictable_pages -= len(held.pages)
        held.pins += 1

    def _unpin_all(self, pinned: Sequence[_Object]) -> None:
        for held in pinned:
            held.pins -= 1
            if not held.pins and held.gone:
                self._free(held.pages)
            elif not held.pins:
                self._evictable_pages += len(held.pages)


def _copy_all(copy: Callable[[Pages, memoryview], None], batch: Sequence[tuple[Pages, memoryview]]) -> None:
    for pages, buffer in batch:
        copy(pages, buffer)
