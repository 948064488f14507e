"""Backends that break a clause about the order of eviction, each in one way and no other."""

from __future__ import annotations

import os
from collections.abc import Sequence

from offload_core.api.backend import StoreReservation
from offload_core.api.keys import ObjectKey
from tests.testing.contract.reference import ReferenceBackend

Keys = Sequence[ObjectKey]


class EvictsForSpareObjects(ReferenceBackend):
    def make_room(self, nbytes: int, is_spare: bool) -> tuple[bool, list[ObjectKey]]:
        return super().make_room(nbytes, False)


class EvictsSpareObjectsForSpareObjects(ReferenceBackend):
    def make_room(self, nbytes: int, is_spare: bool) -> tuple[bool, list[ObjectKey]]:
        any_spare = any(found.spare for found in self.medium.objects.values())
        return super().make_room(nbytes, is_spare and not any_spare)


class RejectsSpareObjects(ReferenceBackend):
    def make_room(self, nbytes: int, is_spare: bool) -> tuple[bool, list[ObjectKey]]:
        return (False, []) if is_spare else super().make_room(nbytes, False)


class StoresSpareObjectsAsKeptOnes(ReferenceBackend):
    async def prepare_store(self, keys: Keys, nbytes: Sequence[int], spare: Sequence[bool] = ()) -> StoreReservation:
        reservation = await super().prepare_store(keys, nbytes, spare)
        for key in keys:
            for reserved in self.medium.reserved[key]:
                reserved.spare = False
        return reservation


class LeavesLoadedObjectsSpare(ReferenceBackend):
    def record_load(self, key: ObjectKey) -> None:
        with self.medium.lock:
            if key in self.medium.objects:
                self.medium.touch(key, spare=self.medium.objects[key].spare)


class IgnoresTouches(ReferenceBackend):
    async def touch(self, keys: Keys, spare: Sequence[bool]) -> None:
        pass


class TouchesTheLastKeyFirst(ReferenceBackend):
    async def touch(self, keys: Keys, spare: Sequence[bool]) -> None:
        await super().touch(keys[::-1], spare[::-1])


class TakesEveryTouchForAUse(ReferenceBackend):
    async def touch(self, keys: Keys, spare: Sequence[bool]) -> None:
        await super().touch(keys, [False] * len(keys))


class NeverKeepsWhatWasSpare(ReferenceBackend):
    async def touch(self, keys: Keys, spare: Sequence[bool]) -> None:
        objects = self.medium.objects
        are_spare = [key in objects and objects[key].spare for key in keys]
        await super().touch(keys, [one or other for one, other in zip(spare, are_spare, strict=True)])


class TouchesPresentObjectsOnly(ReferenceBackend):
    async def touch(self, keys: Keys, spare: Sequence[bool]) -> None:
        for key in keys:
            self.medium.objects[key]
        await super().touch(keys, spare)


class MakesWhatItTouches(ReferenceBackend):
    async def touch(self, keys: Keys, spare: Sequence[bool]) -> None:
        for key in keys:
            if key not in self.medium.objects:
                self.medium.commit(key, b"")
        await super().touch(keys, spare)


class ClearsWhatItTouches(ReferenceBackend):
    async def touch(self, keys: Keys, spare: Sequence[bool]) -> None:
        for key in keys:
            if key in self.medium.objects:
                self.medium.objects[key].content = bytes(self.medium.objects[key].nbytes)
        await super().touch(keys, spare)


class TouchesAPageOnly(ReferenceBackend):
    async def touch(self, keys: Keys, spare: Sequence[bool]) -> None:
        await super().touch(keys[:1000], spare[:1000])


class AsksTheFileSystemInATouch(ReferenceBackend):
    async def touch(self, keys: Keys, spare: Sequence[bool]) -> None:
        os.statvfs("/")
        await super().touch(keys, spare)
