"""Backends that break C22, loads in one call, or C26, stores that seal, each in one way and in no other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import xxhash

from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.api.one_pass import LoadCheck, StoreSeal
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
