"""A backend that keeps the whole contract: memory that many clients share and that outlives them, with a limit."""

from __future__ import annotations

import asyncio
import errno
import itertools
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from mmap import mmap

from pydantic import Field

from offload_core.api.backend import (
    Backend,
    BackendType,
    LoadOutcome,
    LoadReservation,
    StoredObject,
    StoreOutcome,
    StoreReservation,
)
from offload_core.api.capabilities import Capabilities
from offload_core.api.keys import ObjectKey
from offload_core.api.one_pass import LoadCheck, StoreSeal
from offload_core.api.options import BackendOptions


class ReferenceOptions(BackendOptions):
    medium: str = Field(description="the name of the medium; clients with the same name share their objects")
    capacity: int | None = Field(default=None, ge=0, description="limit of all objects together, in bytes")


@dataclass
class Stored:
    content: bytes | bytearray | mmap
    nbytes: int
    stored_at_seconds: float
    spare: bool


@dataclass(eq=False)
class Reserved:
    """Capacity that is reserved for one future store."""

    nbytes: int
    spare: bool = False
    memory: bytearray = field(default_factory=bytearray)
    """The memory that is lent for the object."""
    is_lent: bool = False


class Medium:
    """Objects, least recently used first, their pins and the reserved capacity. All methods are for any thread.

    Attributes:
        is_gone: every operation fails.
        holds: the releases of all held reservations, by client.
        dead: the clients that died.
    """

    def __init__(self) -> None:
        self.is_gone = False
        self.holds: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)
        self.dead: set[int] = set()
        self.lock = threading.RLock()
        self.objects: OrderedDict[ObjectKey, Stored] = OrderedDict()
        self.pins: Counter[ObjectKey] = Counter()
        self.reserved: defaultdict[ObjectKey, list[Reserved]] = defaultdict(list)

    def used(self) -> int:
        stored = sum(found.nbytes for found in self.objects.values())
        return stored + sum(one.nbytes for reserved in self.reserved.values() for one in reserved)

    def evict_for(self, nbytes: int, capacity: int | None) -> tuple[bool, list[ObjectKey]]:
        """Evict unpinned objects, spare ones first, if ``nbytes`` fit then; else evict none."""
        evicted: list[ObjectKey] = []
        excess = 0 if capacity is None else self.used() + nbytes - capacity
        for key, found in sorted(self.objects.items(), key=lambda item: not item[1].spare):
            if excess <= 0:
                break
            if not self.pins[key]:
                evicted.append(key)
                excess -= found.nbytes
        if excess > 0:
            return False, []
        for key in evicted:
            del self.objects[key]
        return True, evicted

    def reservation(self, key: ObjectKey, nbytes: int, memory: object = None) -> Reserved | None:
        """Return the reservation that a store uses: the one that lent ``memory``, else one that lent nothing first."""
        fitting = [one for one in self.reserved[key] if one.nbytes == nbytes]
        return min(fitting, key=lambda one: (one.memory is not memory, one.is_lent), default=None)

    def takes(self, key: ObjectKey, nbytes: int, capacity: int | None) -> bool:
        """Return whether a store has a reservation, or fits without one."""
        if capacity is None or self.reservation(key, nbytes) is not None:
            return True
        replaced = self.objects[key].nbytes if key in self.objects else 0
        return self.used() - replaced + nbytes <= capacity

    def commit(self, key: ObjectKey, content: bytes | bytearray | mmap, memory: object = None) -> None:
        """Make an object visible; it uses the capacity that was reserved for it."""
        with self.lock:
            used = self.reservation(key, len(content), memory)
            if used is not None:
                self.reserved[key].remove(used)
            self.objects[key] = Stored(content, len(content), time.time(), used is not None and used.spare)

    def touch(self, key: ObjectKey, *, spare: bool) -> None:
        """Make an object the most recently used one, and spare or not."""
        with self.lock:
            if key in self.objects:
                self.objects.move_to_end(key)
                self.objects[key].spare = spare


MEDIA: defaultdict[str, Medium] = defaultdict(Medium)
PART_BYTES = 256 * 1024
NUMBERS = itertools.count()
"""Numbers of the clients."""


class PinnedLoad(LoadReservation):
    def __init__(
        self,
        present: Sequence[bool],
        release: Callable[[], None],
        nbytes: Sequence[int | None],
        lend: Callable[[], Sequence[memoryview | None]] | None = None,
    ) -> None:
        super().__init__(present, nbytes=nbytes, lend=lend)
        self._release = release

    async def release(self) -> None:
        self._release()


class ReservedStore(StoreReservation):
    def __init__(
        self,
        outcomes: Sequence[StoreOutcome | None],
        evicted: Sequence[ObjectKey],
        release: Callable[[], None],
        lend: Callable[[], Sequence[memoryview | None]] | None = None,
    ) -> None:
        super().__init__(outcomes, evicted, lend=lend)
        self._release = release

    async def release(self) -> None:
        self._release()


class ReferenceBackend(Backend[ReferenceOptions]):
    capabilities = Capabilities(
        medium="host", persistent=True, shared=True, bounded=True, lists=True, sizes=True, spares=True, lends=True
    )

    async def open(self) -> None:
        self.medium = MEDIA[self.options.medium]
        self.number = next(NUMBERS)
        self.check()

    def check(self) -> None:
        if self.medium.is_gone:
            raise OSError(errno.ENODEV, "the medium is gone")

    def hold(self, release: Callable[[], None]) -> Callable[[], None]:
        """Note a reservation of this client; return the function that releases it."""
        holds = self.medium.holds[self.number]
        holds.append(release)

        def end() -> None:
            with self.medium.lock:
                if release in holds:
                    holds.remove(release)
                    release()

        return end

    def release_dead(self) -> None:
        for client in self.medium.dead:
            for release in self.medium.holds.pop(client, []):
                release()

    async def contains(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        self.check()
        return [key in self.medium.objects for key in keys]

    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        self.check()
        with self.medium.lock:
            present = [key in self.medium.objects for key in keys]
            pinned = [key for key, there in zip(keys, present, strict=True) if there]
            self.medium.pins.update(pinned)
            sizes = [self.size(key) if there else None for key, there in zip(keys, present, strict=True)]
            views = [self.lent(key) if there else None for key, there in zip(keys, present, strict=True)]
        lend = (lambda: views) if self.capabilities.lends else None
        return PinnedLoad(present, self.hold(lambda: self.unpin(pinned)), sizes, lend)

    def lent(self, key: ObjectKey) -> memoryview:
        return memoryview(self.medium.objects[key].content).toreadonly()

    def size(self, key: ObjectKey) -> int:
        return len(self.medium.objects[key].content)

    def unpin(self, keys: Sequence[ObjectKey]) -> None:
        with self.medium.lock:
            self.medium.pins.subtract(keys)

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        return await self.run_blocking(self.load_all, keys, buffers)

    async def load_and_check(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], checks: Sequence[LoadCheck]
    ) -> Sequence[LoadOutcome]:
        return await self.run_blocking(self.load_all_checked, keys, buffers, checks)

    def load_all_checked(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], checks: Sequence[LoadCheck]
    ) -> list[LoadOutcome]:
        outcomes = self.load_all(keys, buffers)
        for outcome, buffer, check in zip(outcomes, buffers, checks, strict=True):
            if outcome is LoadOutcome.HIT:
                self.tell(check, buffer)
        return outcomes

    def tell(self, check: LoadCheck, buffer: memoryview) -> None:
        for start in range(0, len(buffer), 1000):
            check.filled(min(1000, len(buffer) - start))

    def load_all(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        self.check()
        return [self.load(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def load(self, key: ObjectKey, buffer: memoryview) -> LoadOutcome:
        found = self.medium.objects.get(key)
        if found is None:
            return LoadOutcome.MISS
        if len(found.content) != len(buffer):
            return LoadOutcome.CORRUPT
        buffer[:] = found.content
        self.record_load(key)
        return LoadOutcome.HIT

    def record_load(self, key: ObjectKey) -> None:
        self.medium.touch(key, spare=False)

    async def prepare_store(
        self, keys: Sequence[ObjectKey], nbytes: Sequence[int], spare: Sequence[bool] = ()
    ) -> StoreReservation:
        outcomes: list[StoreOutcome | None] = []
        evicted: list[ObjectKey] = []
        granted: list[tuple[ObjectKey, Reserved]] = []
        lent: list[Reserved | None] = []
        self.check()
        with self.medium.lock:
            self.release_dead()
            kept = self.kept_for(keys)
            self.medium.pins.update(kept)
            for key, size, is_spare in zip(keys, nbytes, spare or [False] * len(keys), strict=True):
                if key in self.medium.objects:
                    outcomes.append(StoreOutcome.ALREADY_PRESENT)
                    lent.append(None)
                    continue
                fits, gone = self.make_room(size, is_spare)
                evicted += gone
                outcomes.append(None if fits else StoreOutcome.REJECTED)
                lent.append(None)
                if fits:
                    granted.append((key, Reserved(size, is_spare, self.new_memory(key, size))))
                    self.medium.reserved[key].append(granted[-1][1])
                    lent[-1] = granted[-1][1]
            self.medium.pins.subtract(kept)
        lend = (lambda: self.lend(lent)) if self.capabilities.lends else None
        return ReservedStore(outcomes, evicted, self.hold(lambda: self.give_back(granted)), lend)

    def lend(self, reserved: Sequence[Reserved | None]) -> list[memoryview | None]:
        for one in reserved:
            if one is not None:
                one.is_lent = True
        return [None if one is None else memoryview(one.memory) for one in reserved]

    def new_memory(self, key: ObjectKey, nbytes: int) -> bytearray:
        return bytearray(nbytes)

    def kept_for(self, keys: Sequence[ObjectKey]) -> list[ObjectKey]:
        """Return the objects of a batch that the batch itself must not evict."""
        return [key for key in keys if key in self.medium.objects]

    def capacity(self) -> int | None:
        return self.options.capacity

    def make_room(self, nbytes: int, is_spare: bool) -> tuple[bool, list[ObjectKey]]:
        capacity = self.capacity()
        if is_spare and capacity is not None and self.medium.used() + nbytes > capacity:
            return False, []
        return self.medium.evict_for(nbytes, capacity)

    async def touch(self, keys: Sequence[ObjectKey], spare: Sequence[bool]) -> None:
        self.check()
        for key, is_spare in zip(keys, spare, strict=True):
            self.medium.touch(key, spare=is_spare)

    def give_back(self, granted: Sequence[tuple[ObjectKey, Reserved]]) -> None:
        with self.medium.lock:
            for key, reserved in granted:
                if reserved in self.medium.reserved[key]:  # else a store has used it
                    self.medium.reserved[key].remove(reserved)

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        return await self.run_blocking(self.store_all, keys, buffers)

    async def store_and_seal(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], seals: Sequence[StoreSeal]
    ) -> Sequence[StoreOutcome]:
        return await self.run_blocking(self.store_all_sealed, keys, buffers, seals)

    def store_all_sealed(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], seals: Sequence[StoreSeal]
    ) -> list[StoreOutcome]:
        return self.store_all(keys, [self.sealed(*one) for one in zip(buffers, seals, strict=True)])

    def sealed(self, buffer: memoryview, seal: StoreSeal) -> memoryview:
        """Return a sealed copy of a buffer."""
        copy = bytearray(len(buffer))
        for offset, part in seal.parts(buffer):
            copy[offset : offset + len(part)] = part
        return memoryview(copy)

    def store_all(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        self.check()
        return [self.store_one(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def store_one(self, key: ObjectKey, buffer: memoryview) -> StoreOutcome:
        with self.medium.lock:
            if not self.medium.takes(key, len(buffer), self.capacity()):
                return StoreOutcome.REJECTED
            reserved = self.medium.reserved[key]
            lent = next((one for one in reserved if one.memory is buffer.obj), None)
            content = self.content_of(reserved, buffer) if lent is None else lent.memory
            self.medium.commit(key, content, buffer.obj)
        return StoreOutcome.STORED

    def content_of(self, reserved: Sequence[Reserved], buffer: memoryview) -> bytes | bytearray:
        return bytes(buffer)

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        self.check()
        with self.medium.lock:
            for key in keys:
                self.medium.objects.pop(key, None)

    async def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        self.check()
        with self.medium.lock:
            found = [StoredObject(key, one.nbytes, one.stored_at_seconds) for key, one in self.medium.objects.items()]
        for start in range(0, len(found), 2):
            yield found[start : start + 2]


REFERENCE = BackendType("reference", ReferenceBackend, ReferenceOptions)


class AsyncReference(ReferenceBackend):
    """Makes no thread calls, as a client on asyncio; it copies a part of an object in each turn of the loop."""

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        return await self.run_to_the_end(self.store_in_turns(keys, buffers))

    async def store_in_turns(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        self.check()
        outcomes = []
        for key, buffer in zip(keys, buffers, strict=True):
            content = await self.copied(buffer)
            fits = self.medium.takes(key, len(content), self.capacity())
            if fits:
                self.medium.commit(key, content)
            outcomes.append(StoreOutcome.STORED if fits else StoreOutcome.REJECTED)
        return outcomes

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        return await self.run_to_the_end(self.load_in_turns(keys, buffers))

    async def load_in_turns(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        self.check()
        outcomes = []
        for key, buffer in zip(keys, buffers, strict=True):
            found = self.medium.objects.get(key)
            if found is None or len(found.content) != len(buffer):
                outcomes.append(LoadOutcome.MISS if found is None else LoadOutcome.CORRUPT)
                continue
            for start in range(0, len(buffer), PART_BYTES):
                buffer[start : start + PART_BYTES] = found.content[start : start + PART_BYTES]
                await asyncio.sleep(0)
            self.record_load(key)
            outcomes.append(LoadOutcome.HIT)
        return outcomes

    async def copied(self, buffer: memoryview) -> bytes | mmap:
        """Return a copy. Its memory comes page by page: to clear 16 MiB in one turn takes too long on some machines."""
        if not buffer:
            return b""
        content = mmap(-1, len(buffer))
        for start in range(0, len(buffer), PART_BYTES):
            content[start : start + PART_BYTES] = buffer[start : start + PART_BYTES]
            await asyncio.sleep(0)
        return content

    async def load_and_check(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], checks: Sequence[LoadCheck]
    ) -> Sequence[LoadOutcome]:
        return await self.load_into(keys, buffers)
