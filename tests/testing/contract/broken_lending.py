"""Backends that break C25, lent memory, each in one way and in no other."""

from __future__ import annotations

from collections.abc import Sequence

from offload_core.api.backend import StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.api.memory.shared_memory import SharedMemory
from tests.testing.contract.defects import backend
from tests.testing.contract.reference import ReferenceBackend, Reserved

Keys = Sequence[ObjectKey]
MIB = 1024 * 1024


class LendsAnotherLastByte(ReferenceBackend):
    def lent(self, key: ObjectKey) -> memoryview:
        content = bytearray(self.medium.objects[key].content)
        content[-1:] = bytes([content[-1] ^ 1]) if content else b""
        return memoryview(content)


class ClearsTheMemoryOfDeletedObjects(ReferenceBackend):
    def lent(self, key: ObjectKey) -> memoryview:
        content = bytearray(self.medium.objects[key].content)
        if len(content) > MIB:
            return super().lent(key)
        self.memory().setdefault(key, []).append(content)
        return memoryview(content)

    async def delete(self, keys: Keys) -> None:
        await super().delete(keys)
        for key in keys:
            for content in self.memory().pop(key, []):
                content[:] = bytes(len(content))

    def memory(self) -> dict[ObjectKey, list[bytearray]]:
        memory: dict[ObjectKey, list[bytearray]] = self.medium.__dict__.setdefault("lent", {})
        return memory


class ForgetsTheLentBytes(ReferenceBackend):
    def store_one(self, key: ObjectKey, buffer: memoryview) -> StoreOutcome:
        for reserved in self.medium.reserved[key]:
            if reserved.memory is buffer.obj:
                reserved.memory[:] = bytes(len(buffer))
        return super().store_one(key, buffer)


class UsesMemoryThatIsLent(ReferenceBackend):
    def content_of(self, reserved: Sequence[Reserved], buffer: memoryview) -> bytes | bytearray:
        for one in reserved:
            if one.is_lent:
                one.memory[:] = buffer
                return one.memory
        return super().content_of(reserved, buffer)


class LendsOneMemoryForEachKey(ReferenceBackend):
    def new_memory(self, key: ObjectKey, nbytes: int) -> bytearray:
        return next((one.memory for one in self.medium.reserved[key]), bytearray(nbytes))


class MakesObjectsOfFilledViews(ReferenceBackend):
    def give_back(self, granted: Sequence[tuple[ObjectKey, Reserved]]) -> None:
        for key, reserved in granted:
            if key not in self.medium.objects and any(reserved.memory):
                self.medium.commit(key, reserved.memory)
        super().give_back(granted)


class NamesOtherMemory(ReferenceBackend):
    @property
    def lent_memory(self) -> SharedMemory:
        memory = self.medium.__dict__.setdefault("other", SharedMemory.create("other", 4096))
        assert isinstance(memory, SharedMemory)
        return memory


BROKEN_LENDING = [
    backend(
        LendsAnotherLastByte,
        r"C25: the view of an object.*: byte \d+ of \d+ is 0x",
        "c25_a_view_of_a_load_has_the_objects_bytes",
        "c25_a_view_of_a_load_outlives_deletes_and_evictions",
    ),
    backend(
        ClearsTheMemoryOfDeletedObjects,
        r"C25: the view of an object, after the delete of one and many stores,: byte \d+ of 65536 is 0x00",
        "c25_a_view_of_a_load_outlives_deletes_and_evictions",
    ),
    backend(
        ForgetsTheLentBytes,
        r"C25: an object (filled in its lent view|stored .*): byte \d+ of \d+ is 0x00",
        "c25_a_view_of_a_store_becomes_the_object",
        "c25_two_reservations_of_one_key_have_memory_of_their_own",
    ),
    backend(
        UsesMemoryThatIsLent,
        r"C25: an object stored while memory for it was lent: byte 0 of 5000 is 0x11",
        "c25_a_store_of_other_memory_leaves_lent_memory_alone",
    ),
    backend(
        LendsOneMemoryForEachKey,
        r"C25: two views for objects to store share bytes",
        "c25_two_reservations_of_one_key_have_memory_of_their_own",
    ),
    backend(
        MakesObjectsOfFilledViews,
        r"C25: contains after the release returned \[True\]; it should return \[False\]",
        "c25_what_is_written_to_a_view_that_is_not_stored_is_no_object",
    ),
    backend(
        NamesOtherMemory,
        r"C25: a view of 5000 bytes is at byte -?\d+ of a lent memory of 4096",
        "c25_all_views_are_in_the_lent_memory",
    ),
]
