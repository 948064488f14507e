"""Backends that break a clause in loads in one call or in stores that seal, each in one way and in no other."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

import xxhash

from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.api.one_pass import LoadCheck, StoreSeal
from tests.testing.contract.defects import backend
from tests.testing.contract.reference import ReferenceBackend

Keys = Sequence[ObjectKey]
Buffers = Sequence[memoryview]
Checks = Sequence[LoadCheck]
Seals = Sequence[StoreSeal]


class MissesWhatDoesNotFit(ReferenceBackend):
    def load_all_checked(self, keys: Keys, buffers: Buffers, checks: Checks) -> list[LoadOutcome]:
        outcomes = super().load_all_checked(keys, buffers, checks)
        return [LoadOutcome.MISS if outcome is LoadOutcome.CORRUPT else outcome for outcome in outcomes]


class ClearsBuffersInOneCall(ReferenceBackend):
    def load_all_checked(self, keys: Keys, buffers: Buffers, checks: Checks) -> list[LoadOutcome]:
        for buffer in buffers:
            buffer[:] = bytes(len(buffer))
        return super().load_all_checked(keys, buffers, checks)


class TellsBeforeItReads(ReferenceBackend):
    def load_all_checked(self, keys: Keys, buffers: Buffers, checks: Checks) -> list[LoadOutcome]:
        for key, buffer, check in zip(keys, buffers, checks, strict=True):
            if key in self.medium.objects:
                self.tell(check, buffer)
        return self.load_all(keys, buffers)


class TellsOfWholeParts(ReferenceBackend):
    def tell(self, check: LoadCheck, buffer: memoryview) -> None:
        for _ in range(0, len(buffer), 1000):
            check.filled(1000)


class HashesOtherMemory(ReferenceBackend):
    def tell(self, check: LoadCheck, buffer: memoryview) -> None:
        check.hashed(bytes(16))


class HashesTheWholeBuffer(ReferenceBackend):
    def tell(self, check: LoadCheck, buffer: memoryview) -> None:
        check.hashed(xxhash.xxh3_128_digest(buffer))


class HashesAfterParts(ReferenceBackend):
    def tell(self, check: LoadCheck, buffer: memoryview) -> None:
        super().tell(check, buffer)
        check.hashed(xxhash.xxh3_128_digest(buffer[check.hash_start :]))


class LeavesItsThreadInOneCall(ReferenceBackend):
    async def load_and_check(self, keys: Keys, buffers: Buffers, checks: Checks) -> Sequence[LoadOutcome]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.context.executor, self.load_all_checked, keys, buffers, checks)


class RejectsTheLastOneThatItSeals(ReferenceBackend):
    def store_all_sealed(self, keys: Keys, buffers: Buffers, seals: Seals) -> list[StoreOutcome]:
        stored = super().store_all_sealed(keys, buffers, seals)
        return [*stored[:-1], StoreOutcome.REJECTED] if len(stored) == 3 else stored


class StoresTheBeginningFirst(ReferenceBackend):
    def sealed(self, buffer: memoryview, seal: StoreSeal) -> memoryview:
        copy = bytes(buffer)
        seal.seal()
        return memoryview(copy)


class SealsAfterItHasAnswered(ReferenceBackend):
    async def store_and_seal(self, keys: Keys, buffers: Buffers, seals: Seals) -> Sequence[StoreOutcome]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.context.executor, self.store_all_sealed, keys, buffers, seals)


class ReadsPartsInOneCall(ReferenceBackend):
    """The second half of a large object is of the one that is there at that moment."""

    def load_all_checked(self, keys: Keys, buffers: Buffers, checks: Checks) -> list[LoadOutcome]:
        outcomes = super().load_all_checked(keys, buffers, checks)
        for key, buffer, outcome in zip(keys, buffers, outcomes, strict=True):
            if outcome is LoadOutcome.HIT and len(buffer) > 100_000:
                self.load_half(key, buffer)
        return outcomes

    def load_half(self, key: ObjectKey, buffer: memoryview) -> None:
        half = len(buffer) // 2
        for _ in range(100):
            found = self.medium.objects.get(key)
            if found is not None and len(found.content) == len(buffer) and found.content[0] != buffer[0]:
                buffer[half:] = found.content[half:]
                return
            time.sleep(0.0005)  # until a writer has replaced the object


class SealsInPlace(ReferenceBackend):
    """A small object is visible before it is sealed."""

    async def store_and_seal(self, keys: Keys, buffers: Buffers, seals: Seals) -> Sequence[StoreOutcome]:
        if max(map(len, buffers), default=0) > 100_000:
            return await super().store_and_seal(keys, buffers, seals)
        outcomes = await self.run_blocking(self.store_all, keys, buffers)
        return await self.run_blocking(self.seal_all, keys, buffers, seals, outcomes)

    def seal_all(
        self, keys: Keys, buffers: Buffers, seals: Seals, outcomes: Sequence[StoreOutcome]
    ) -> Sequence[StoreOutcome]:
        for key, buffer, seal in zip(keys, buffers, seals, strict=True):
            seal.seal()
            found = self.medium.objects.get(key)
            if found is not None:
                found.content = bytes(buffer)
        return outcomes


class PinsInOneCallForEver(ReferenceBackend):
    async def load_and_check(self, keys: Keys, buffers: Buffers, checks: Checks) -> Sequence[LoadOutcome]:
        await self.prepare_load(keys)
        return await super().load_and_check(keys, buffers, checks)


class LeavesObjectsSpareInOneCall(ReferenceBackend):
    is_one_call = False

    def load_all_checked(self, keys: Keys, buffers: Buffers, checks: Checks) -> list[LoadOutcome]:
        self.is_one_call = True
        try:
            return super().load_all_checked(keys, buffers, checks)
        finally:
            self.is_one_call = False

    def record_load(self, key: ObjectKey) -> None:
        if not self.is_one_call:
            super().record_load(key)


class AsksTheFileSystemInOneCall(ReferenceBackend):
    async def load_and_check(self, keys: Keys, buffers: Buffers, checks: Checks) -> Sequence[LoadOutcome]:
        os.statvfs("/")
        return await super().load_and_check(keys, buffers, checks)


class AsksTheFileSystemBeforeASeal(ReferenceBackend):
    async def store_and_seal(self, keys: Keys, buffers: Buffers, seals: Seals) -> Sequence[StoreOutcome]:
        os.statvfs("/")
        return await super().store_and_seal(keys, buffers, seals)


BROKEN_SHORT_WAYS = [
    backend(
        ReadsPartsInOneCall,
        r"C6: while (131072|6291457) equal bytes were stored .*, a load answered HIT with \d+ bytes '.*', \d+ ",
        "c06_readers_see_whole_objects_while_others_write",
        "c06_readers_see_large_objects_whole_while_others_write",
    ),
    backend(
        SealsInPlace,
        r"C6: an object (before thread call 2 of its store|after its store failed at thread call 2): byte 0 of 10000",
        "c06_between_the_steps_of_a_store_others_see_all_or_nothing",
        "c06_a_store_that_fails_or_is_cancelled_leaves_all_or_nothing",
    ),
    backend(
        PinsInOneCallForEver,
        r"C10: 16 objects were pinned and released 4 times in each way to load them, and the medium evicts none",
        "c10_what_was_pinned_makes_room_after_its_release",
    ),
    backend(
        LeavesObjectsSpareInOneCall,
        r"C20: the order of eviction should be: spare objects, .* \[10, 4, 2\] objects, \[0, 4, 1\] are left",
        "c20_a_spare_object_that_was_loaded_is_kept",
    ),
]
