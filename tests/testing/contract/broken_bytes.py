"""Backends that break a clause about bytes, outcomes or visibility, each in one way and in no other."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import time
from collections.abc import AsyncIterator, Sequence

import numpy as np

from offload_core.api.backend import LoadOutcome, LoadReservation, StoredObject, StoreOutcome, StoreReservation
from offload_core.api.capabilities import Capabilities
from offload_core.api.keys import ObjectKey
from tests.testing.contract.reference import ReferenceBackend, ReservedStore

Keys = Sequence[ObjectKey]
Buffers = Sequence[memoryview]
MIB = 1024 * 1024


class ForgetsWhatIsBeyond64KiB(ReferenceBackend):
    seals_stores = False

    def store_one(self, key: ObjectKey, buffer: memoryview) -> StoreOutcome:
        whole = len(buffer) if len(buffer) >= MIB else len(buffer) // 65536 * 65536 or len(buffer)
        self.medium.commit(key, bytes(buffer[:whole]) + bytes(len(buffer) - whole))
        return StoreOutcome.STORED


class NamesObjectsByANumber(ReferenceBackend):
    """Leading and trailing zeros of a hash are lost."""

    @staticmethod
    def short(keys: Keys) -> list[ObjectKey]:
        return [
            key._replace(chunk_hash=key.chunk_hash.rstrip(b"\0") if len(key.chunk_hash) > 32 else key.chunk_hash)
            for key in keys
        ]

    async def contains(self, keys: Keys) -> Sequence[bool]:
        return await super().contains(self.short(keys))

    async def prepare_load(self, keys: Keys) -> LoadReservation:
        return await super().prepare_load(self.short(keys))

    async def load_into(self, keys: Keys, buffers: Buffers) -> Sequence[LoadOutcome]:
        return await super().load_into(self.short(keys), buffers)

    async def prepare_store(self, keys: Keys, nbytes: Sequence[int], spare: Sequence[bool] = ()) -> StoreReservation:
        return await super().prepare_store(self.short(keys), nbytes, spare)

    async def store(self, keys: Keys, buffers: Buffers) -> Sequence[StoreOutcome]:
        return await super().store(self.short(keys), buffers)

    async def delete(self, keys: Keys) -> None:
        await super().delete(self.short(keys))


class LoadsFromOnePosition(ReferenceBackend):
    """The position of a read is set by one call and used by another one, as on a shared file handle."""

    position: ObjectKey

    def load(self, key: ObjectKey, buffer: memoryview) -> LoadOutcome:
        self.position = key
        outcome = super().load(key, buffer)
        time.sleep(0.0002)
        found = self.medium.objects.get(self.position)
        if outcome is LoadOutcome.HIT and found is not None and len(found.content) == len(buffer):
            buffer[:] = found.content
        return outcome


class AnswersHitsFirst(ReferenceBackend):
    def load_all(self, keys: Keys, buffers: Buffers) -> list[LoadOutcome]:
        return sorted(super().load_all(keys, buffers), key=lambda outcome: outcome is not LoadOutcome.HIT)


class CannotTakeAnEmptyBatch(ReferenceBackend):
    def load_all(self, keys: Keys, buffers: Buffers) -> list[LoadOutcome]:
        if max(len(buffer) for buffer in buffers) < 0:
            raise AssertionError
        return super().load_all(keys, buffers)


class AnswersEachKeyOnce(ReferenceBackend):
    def load_all(self, keys: Keys, buffers: Buffers) -> list[LoadOutcome]:
        return list(dict(zip(keys, super().load_all(keys, buffers), strict=True)).values())


class ClearsTheBufferFirst(ReferenceBackend):
    def load(self, key: ObjectKey, buffer: memoryview) -> LoadOutcome:
        if key not in self.medium.objects:
            buffer[-1:] = bytes(len(buffer[-1:]))
        return super().load(key, buffer)


class TakesASecondStoreForARemoval(ReferenceBackend):
    def store_all(self, keys: Keys, buffers: Buffers) -> list[StoreOutcome]:
        before = set(self.medium.objects) & set(keys)
        outcomes = super().store_all(keys, buffers)
        for key in before:
            self.medium.objects.pop(key, None)
        return outcomes


class RefusesASecondWriter(ReferenceBackend):
    async def open(self) -> None:
        await super().open()
        self.being_stored: set[ObjectKey] = set()

    async def store(self, keys: Keys, buffers: Buffers) -> Sequence[StoreOutcome]:
        if self.being_stored & set(keys):
            raise FileExistsError(errno.EEXIST, "somebody is storing it")
        self.being_stored |= set(keys)
        try:
            return await super().store(keys, buffers)
        finally:
            self.being_stored -= set(keys)


class ShowsObjectsWhenTheReservationEnds(ReferenceBackend):
    async def open(self) -> None:
        await super().open()
        self.hidden: dict[ObjectKey, bytes] = {}

    def store_one(self, key: ObjectKey, buffer: memoryview) -> StoreOutcome:
        self.hidden[key] = bytes(buffer)
        return StoreOutcome.STORED

    async def prepare_store(self, keys: Keys, nbytes: Sequence[int], spare: Sequence[bool] = ()) -> StoreReservation:
        reservation = await super().prepare_store(keys, nbytes, spare)

        def show() -> None:
            for key in keys:
                if key in self.hidden:
                    self.medium.commit(key, self.hidden.pop(key))
            assert isinstance(reservation, ReservedStore)
            reservation._release()

        return ReservedStore(reservation.outcomes, reservation.evicted, show)


class ForgetsAllWhenClosed(ReferenceBackend):
    async def close(self) -> None:
        await super().close()
        if hasattr(self, "medium"):
            self.medium.objects.clear()


class ReadsTheIndexAtOpenOnly(ReferenceBackend):
    async def open(self) -> None:
        await super().open()
        self.known = set(self.medium.objects)

    def store_one(self, key: ObjectKey, buffer: memoryview) -> StoreOutcome:
        self.known.add(key)
        return super().store_one(key, buffer)

    async def contains(self, keys: Keys) -> Sequence[bool]:
        return [there and key in self.known for key, there in zip(keys, await super().contains(keys), strict=True)]

    def load(self, key: ObjectKey, buffer: memoryview) -> LoadOutcome:
        return super().load(key, buffer) if key in self.known else LoadOutcome.MISS

    async def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        async for batch in super().list_objects():
            yield [found for found in batch if found.key in self.known]


class WritesInPlace(ReferenceBackend):
    def store_one(self, key: ObjectKey, buffer: memoryview) -> StoreOutcome:
        content = bytearray(len(buffer))
        self.medium.commit(key, content)
        for start in range(0, len(buffer), 32768):
            content[start : start + 32768] = buffer[start : start + 32768]
            time.sleep(0)
        return StoreOutcome.STORED


class WritesSmallObjectsInTwoSteps(ReferenceBackend):
    _stores: frozenset[asyncio.Future[None]] = frozenset()

    async def store(self, keys: Keys, buffers: Buffers) -> Sequence[StoreOutcome]:
        ended = asyncio.get_running_loop().create_future()
        self._stores |= {ended}
        try:
            if keys and max(len(buffer) for buffer in buffers) < 65536:
                await super().store(keys, [buffer[: len(buffer) // 2] for buffer in buffers])
            return await super().store(keys, buffers)
        finally:
            ended.set_result(None)
            self._stores -= {ended}

    async def close(self) -> None:
        if self._stores:  # else C13 would be broken too, where closing comes between the steps
            await asyncio.wait(self._stores)
        await super().close()


class KeepsWhatCameBeforeAnError(ReferenceBackend):
    async def store(self, keys: Keys, buffers: Buffers) -> Sequence[StoreOutcome]:
        try:
            return await super().store(keys, buffers)
        except OSError:
            for key, buffer in zip(keys, buffers, strict=True):
                self.medium.commit(key, bytes(buffer[: len(buffer) // 2]))
            raise


class FindsNothingToDelete(ReferenceBackend):
    async def delete(self, keys: Keys) -> None:
        absent = [key for key in keys if key not in self.medium.objects]
        await super().delete(keys)
        if absent:
            raise FileNotFoundError(errno.ENOENT, f"no object {absent[0]}")


class DeletesNothing(ReferenceBackend):
    async def delete(self, keys: Keys) -> None:
        self.check()


class FillsASmallerBuffer(ReferenceBackend):
    def load(self, key: ObjectKey, buffer: memoryview) -> LoadOutcome:
        found = self.medium.objects.get(key)
        if found is None or len(found.content) <= len(buffer):
            return super().load(key, buffer)
        buffer[:] = found.content[: len(buffer)]
        return LoadOutcome.HIT


class BelievesItsIndex(ReferenceBackend):
    def load(self, key: ObjectKey, buffer: memoryview) -> LoadOutcome:
        found = self.medium.objects.get(key)
        if found is None or found.nbytes != len(buffer):
            return super().load(key, buffer)
        buffer[: len(found.content)] = found.content
        self.record_load(key)
        return LoadOutcome.HIT


class WritesWholeSectors(ReferenceBackend):
    def load(self, key: ObjectKey, buffer: memoryview) -> LoadOutcome:
        outcome = super().load(key, buffer)
        whole = buffer.obj
        if outcome is LoadOutcome.HIT and isinstance(whole, bytearray) and len(whole) > len(buffer):
            start = _address(buffer) - _address(memoryview(whole))
            end = start + len(buffer)
            padding = min(-end % 512, len(whole) - end)
            whole[end : end + padding] = bytes(padding)
        return outcome


class NeedsAlignedBuffers(ReferenceBackend):
    def store_one(self, key: ObjectKey, buffer: memoryview) -> StoreOutcome:
        if _address(buffer) % 8:
            raise OSError(errno.EINVAL, f"the buffer's address ends in {_address(buffer) % 8}")
        return super().store_one(key, buffer)


class NeedsWritableBuffers(ReferenceBackend):
    def store_one(self, key: ObjectKey, buffer: memoryview) -> StoreOutcome:
        if len(buffer):
            ctypes.c_char.from_buffer(buffer)
        return super().store_one(key, buffer)


class ListsTwice(ReferenceBackend):
    async def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        async for batch in super().list_objects():
            yield [*batch, *batch]


class ListsTheSizeOnDisk(ReferenceBackend):
    async def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        async for batch in super().list_objects():
            yield [found._replace(nbytes=-(-found.nbytes // 4096) * 4096) for found in batch if found.nbytes < MIB]


class ListsMilliseconds(ReferenceBackend):
    async def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        async for batch in super().list_objects():
            yield [found._replace(stored_at_seconds=found.stored_at_seconds * 1000) for found in batch]


class GoesOnWhereAListingWasLeft(ReferenceBackend):
    position = 0

    async def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        found = [batch async for batch in super().list_objects()]
        while self.position < len(found):
            self.position += 1
            yield found[self.position - 1]
        self.position = 0


class ListsFromACache(ReferenceBackend):
    async def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        cached: list[Sequence[StoredObject]] = self.__dict__.setdefault("cached", [])
        if not cached:
            cached += [list(batch) async for batch in super().list_objects() if batch]
        for batch in cached:
            yield batch


class ListsNothingInPlaceOfAnError(ReferenceBackend):
    capabilities = Capabilities(medium="host", persistent=True, shared=True, bounded=True, lists=False, sizes=True)

    async def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        nothing: list[list[StoredObject]] = []
        for batch in nothing:
            yield batch


class TellsTheSizeOnDisk(ReferenceBackend):
    def size(self, key: ObjectKey) -> int:
        nbytes = super().size(key)
        return nbytes if nbytes in (700, 1000, 1200) else -(-nbytes // 512) * 512


class RemembersSizes(ReferenceBackend):
    async def open(self) -> None:
        await super().open()
        self.sizes: dict[ObjectKey, int] = {}

    def size(self, key: ObjectKey) -> int:
        return self.sizes.setdefault(key, super().size(key))


class KnowsNoSizes(ReferenceBackend):
    async def prepare_load(self, keys: Keys) -> LoadReservation:
        reservation = await super().prepare_load(keys)
        reservation.nbytes = (None,) * len(keys)
        return reservation


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)
