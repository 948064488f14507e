"""Backends that break a clause about names, each in one way and no other, and the tests that must find them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence

from offload_core.api.backend import LoadOutcome, StoredObject, StoreOutcome
from offload_core.api.keys import ObjectKey
from tests.testing.contract.broken_bytes import NamesObjectsByANumber
from tests.testing.contract.defects import backend
from tests.testing.contract.reference import ReferenceBackend

Keys = Sequence[ObjectKey]

PAGE = 1000
MOST_CHARACTERS = 255


class CutsLongPackNames(NamesObjectsByANumber):
    @staticmethod
    def short(keys: Keys) -> list[ObjectKey]:
        return [key._replace(pack=key.pack[:48]) for key in keys]


class CutsLongFileNames(NamesObjectsByANumber):
    @staticmethod
    def short(keys: Keys) -> list[ObjectKey]:
        return [
            key._replace(chunk_hash=key.chunk_hash[:-2]) if len(key.path) > MOST_CHARACTERS else key for key in keys
        ]


class FindsWhatBeginsAlike(ReferenceBackend):
    async def contains(self, keys: Keys) -> Sequence[bool]:
        await super().contains(keys)
        names = [key.path for key in self.medium.objects]
        return [any(name.startswith(key.path) for name in names) for key in keys]


class DeletesWhatBeginsAlike(ReferenceBackend):
    async def delete(self, keys: Keys) -> None:
        stored = list(self.medium.objects)
        await super().delete([one for one in stored for key in keys if one.path.startswith(key.path)])


class FindsAPageOnly(ReferenceBackend):
    async def contains(self, keys: Keys) -> Sequence[bool]:
        found = await super().contains(keys)
        return [there and index < PAGE for index, there in enumerate(found)]


class LoadsAtMost128(ReferenceBackend):
    def load_all(self, keys: Keys, buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        outcomes = super().load_all(keys[:128], buffers[:128])
        return outcomes + [LoadOutcome.MISS] * (len(keys) - len(outcomes))


class StoresZerosAfterObject100(ReferenceBackend):
    def store_all(self, keys: Keys, buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        zeros = [memoryview(bytes(len(buffer))) for buffer in buffers[100:]]
        return super().store_all(keys, [*buffers[:100], *zeros])


class LooksAtEachKeyForLong(ReferenceBackend):
    async def contains(self, keys: Keys) -> Sequence[bool]:
        end = time.thread_time() + 0.0001 * len(keys)
        while time.thread_time() < end:
            pass
        return await super().contains(keys)


class DeletesAPageOnly(ReferenceBackend):
    async def delete(self, keys: Keys) -> None:
        await super().delete(keys[:PAGE])


class ListsAPageOnly(ReferenceBackend):
    async def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        count = 0
        async for batch in super().list_objects():
            yield batch[: PAGE - count]
            count += len(batch)
            if count >= PAGE:
                return


class NeedsEachObjectThatItLists(ReferenceBackend):
    async def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        self.check()
        for key in list(self.medium.objects):
            found = self.medium.objects[key]
            yield [StoredObject(key, found.nbytes, found.stored_at_seconds)]


class ListsByPosition(ReferenceBackend):
    async def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        self.check()
        place = 0
        while page := list(self.medium.objects.items())[place : place + 10]:
            yield [StoredObject(key, found.nbytes, found.stored_at_seconds) for key, found in page]
            place += 10


class ListsReservedObjects(ReferenceBackend):
    async def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        async for batch in super().list_objects():
            yield batch
        with self.medium.lock:
            reserved = [(key, some[0].nbytes) for key, some in self.medium.reserved.items() if some]
        yield [StoredObject(key, nbytes, 1e9) for key, nbytes in reserved if key not in self.medium.objects]


BROKEN_NAMES = [
    backend(
        CutsLongPackNames,
        r"C1: abababababab…/p{63}0/\w+, which was stored with keys that end otherwise,: byte 0 of 64 is 0x",
        "c01_long_names_are_not_cut",
    ),
    backend(
        CutsLongFileNames,
        r"C1: abababababab…/p{63}0/\w+, which was stored with keys that end otherwise,: byte 0 of 64 is 0x",
        "c01_long_names_are_not_cut",
    ),
    backend(
        FindsWhatBeginsAlike,
        r"C1: contains found abababababab…/full-u256/\w+ after abababababab…/full-u256/\w+ was stored",
        "c01_a_key_that_begins_like_a_stored_one_is_absent",
    ),
    backend(
        DeletesWhatBeginsAlike,
        r"C12: contains\(\[abababababab…/full-u256/\w+\]\), after a delete of .*, returned \[False\]",
        "c12_a_delete_leaves_keys_that_begin_alike",
    ),
    backend(
        FindsAPageOnly,
        r"C2: contains of 2200 keys answered 600 of them wrongly, the first at place 1000",
        "c02_a_large_batch_is_answered_to_its_end",
    ),
    backend(
        LoadsAtMost128,
        r"C2: load_into of 256 keys answered 64 of them wrongly, the first at place 128",
        "c02_a_large_batch_is_answered_to_its_end",
    ),
    backend(
        StoresZerosAfterObject100,
        r"C2: the buffer of abababababab…/full-u256/\w+ in a batch of 256 keys: byte 0 of 3 is 0x00 in place of 0x31",
        "c02_a_large_batch_is_answered_to_its_end",
    ),
    backend(
        LooksAtEachKeyForLong,
        r"C8: contains of 1100 keys computed for 1\d\d\.\d ms on the event loop's thread .* than 50 ms",
        "c08_nothing_is_computed_on_the_event_loop",
    ),
    backend(
        DeletesAPageOnly,
        r"C12: of 1100 objects that one call deleted, 100 are still present",
        "c12_a_large_batch_is_deleted_to_its_end",
    ),
    backend(
        ListsAPageOnly,
        r"C18: of 1100 objects, list_objects does not list 100",
        "c18_a_listing_goes_to_its_end",
    ),
    backend(
        NeedsEachObjectThatItLists,
        r"C18: the backend raised KeyError: ObjectKey",
        "c18_a_listing_goes_on_when_objects_are_deleted",
    ),
    backend(
        ListsByPosition,
        r"C18: 20 objects were deleted during a listing; of 20 others, it did not list 5 exactly once",
        "c18_a_listing_goes_on_when_objects_are_deleted",
    ),
    backend(
        ListsReservedObjects,
        r"C18: list_objects lists an object whose room is reserved; contains says False",
        "c18_a_listing_names_no_unfinished_object",
    ),
]
