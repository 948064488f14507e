"""Backends that break a clause about limits, large objects, time, failures or death, and the tests that find them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import suppress
from dataclasses import replace

from offload_core.api.backend import LoadOutcome, LoadReservation, StoredObject, StoreOutcome, StoreReservation
from offload_core.api.keys import ObjectKey
from tests.testing.contract.defects import backend
from tests.testing.contract.reference import MEDIA, NUMBERS, AsyncReference, ReferenceBackend, Reserved

Keys = Sequence[ObjectKey]
Buffers = Sequence[memoryview]
MIB = 1024 * 1024
LARGE = 4 * MIB
TTL_SECONDS = 2.0


class LimitsEachClientByItself(ReferenceBackend):
    async def prepare_store(self, keys: Keys, nbytes: Sequence[int], spare: Sequence[bool] = ()) -> StoreReservation:
        reservation = await super().prepare_store(keys, nbytes, spare)
        self.owners().update((key, self.number) for key, one in zip(keys, reservation.outcomes, strict=True) if not one)
        return reservation

    def owners(self) -> dict[ObjectKey, int]:
        owners: dict[ObjectKey, int] = self.medium.__dict__.setdefault("owners", {})
        return owners

    def capacity(self) -> int | None:
        return None if self.options.capacity is None else self.options.capacity + self.of_others()

    def of_others(self) -> int:
        owners, objects = self.owners(), self.medium.objects
        return self.reserved_by_others() + sum(
            found.nbytes for key, found in objects.items() if owners.get(key, self.number) != self.number
        )

    def reserved_by_others(self) -> int:
        owners, reserved = self.owners(), self.medium.reserved
        others = [key for key in reserved if owners.get(key, self.number) != self.number]
        return sum(one.nbytes for key in others for one in reserved[key])


class IgnoresReservationsOfOthers(LimitsEachClientByItself):
    def of_others(self) -> int:
        return self.reserved_by_others()


class HidesEvictions(ReferenceBackend):
    capabilities = replace(ReferenceBackend.capabilities, shared=False)

    async def prepare_store(self, keys: Keys, nbytes: Sequence[int], spare: Sequence[bool] = ()) -> StoreReservation:
        reservation = await super().prepare_store(keys, nbytes, spare)
        reservation.evicted = ()
        return reservation


class ReportsPresentObjectsAsEvicted(HidesEvictions):
    async def prepare_store(self, keys: Keys, nbytes: Sequence[int], spare: Sequence[bool] = ()) -> StoreReservation:
        reservation = await ReferenceBackend.prepare_store(self, keys, nbytes, spare)
        answers = zip(keys, reservation.outcomes, strict=True)
        reservation.evicted += tuple(key for key, outcome in answers if outcome is StoreOutcome.ALREADY_PRESENT)
        return reservation


class KeepsRoomOfAFailedPreparation(ReferenceBackend):
    async def prepare_store(self, keys: Keys, nbytes: Sequence[int], spare: Sequence[bool] = ()) -> StoreReservation:
        reservation = await super().prepare_store(keys, nbytes, spare)
        await _released_if_cancelled(reservation, self.run_blocking(int))
        return reservation


class KeepsPinsOfAFailedPreparation(ReferenceBackend):
    async def prepare_load(self, keys: Keys) -> LoadReservation:
        reservation = await super().prepare_load(keys)
        await _released_if_cancelled(reservation, self.run_blocking(int))
        return reservation


async def _released_if_cancelled(reservation: LoadReservation | StoreReservation, call: Awaitable[object]) -> None:
    try:
        await call
    except asyncio.CancelledError:
        await reservation.release()
        raise


class StoresUnderTheFirstReservation(ReferenceBackend):
    def store_one(self, key: ObjectKey, buffer: memoryview) -> StoreOutcome:
        with self.medium.lock:
            reserved = self.medium.reserved[key]
            if reserved and reserved[0].nbytes > len(buffer):
                reserved[0].nbytes = len(buffer)
        return super().store_one(key, buffer)


class StoresWithoutAReservation(ReferenceBackend):
    def store_one(self, key: ObjectKey, buffer: memoryview) -> StoreOutcome:
        with self.medium.lock:
            if self.medium.reservation(key, len(buffer)) is None:
                self.medium.commit(key, bytes(buffer))
                return StoreOutcome.STORED
        return super().store_one(key, buffer)


class EvictsObjectsOfItsBatch(ReferenceBackend):
    def kept_for(self, keys: Keys) -> list[ObjectKey]:
        return []


class ForgetsAfterAWhile(ReferenceBackend):
    def check(self) -> None:
        super().check()
        with self.medium.lock:
            oldest = time.time() - TTL_SECONDS
            for key in [key for key, found in self.medium.objects.items() if found.stored_at_seconds < oldest]:
                del self.medium.objects[key]


class WritesLargeObjectsInPlace(ReferenceBackend):
    def store_one(self, key: ObjectKey, buffer: memoryview) -> StoreOutcome:
        if len(buffer) <= LARGE:
            return super().store_one(key, buffer)
        content = bytearray(len(buffer))
        self.medium.commit(key, content)
        for start in range(0, len(buffer), MIB):
            content[start : start + MIB] = buffer[start : start + MIB]
            time.sleep(0.001)
        return StoreOutcome.STORED


class LoadsLargeObjectsPartByPart(ReferenceBackend):
    def load(self, key: ObjectKey, buffer: memoryview) -> LoadOutcome:
        if len(buffer) <= LARGE:
            return super().load(key, buffer)
        for start in range(0, len(buffer), MIB):
            found = self.medium.objects.get(key)
            if found is None:
                return LoadOutcome.MISS
            if len(found.content) != len(buffer):
                return LoadOutcome.CORRUPT
            buffer[start : start + MIB] = found.content[start : start + MIB]
            time.sleep(0.001)
        self.record_load(key)
        return LoadOutcome.HIT


class ListsUnfinishedUploads(ReferenceBackend):
    def uploads(self) -> dict[ObjectKey, int]:
        uploads: dict[ObjectKey, int] = self.medium.__dict__.setdefault("uploads", {})
        return uploads

    def store_one(self, key: ObjectKey, buffer: memoryview) -> StoreOutcome:
        for done in range(MIB, len(buffer), MIB):
            self.uploads()[key] = done
            time.sleep(0.002)
        self.uploads().pop(key, None)
        return super().store_one(key, buffer)

    async def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        async for batch in super().list_objects():
            yield batch
        yield [StoredObject(key, done, time.time()) for key, done in list(self.uploads().items())]


class FindsNothingOnAMediumThatIsGone(ReferenceBackend):
    async def contains(self, keys: Keys) -> Sequence[bool]:
        try:
            return await super().contains(keys)
        except OSError:
            return [False] * len(keys)


class PreparesNothingOnAMediumThatIsGone(ReferenceBackend):
    async def prepare_load(self, keys: Keys) -> LoadReservation:
        try:
            return await super().prepare_load(keys)
        except OSError:
            return LoadReservation([False] * len(keys))


class MissesOnAMediumThatIsGone(ReferenceBackend):
    def load_all(self, keys: Keys, buffers: Buffers) -> list[LoadOutcome]:
        try:
            return super().load_all(keys, buffers)
        except OSError:
            return [LoadOutcome.MISS] * len(keys)


class StoresOnAMediumThatIsGone(ReferenceBackend):
    def store_all(self, keys: Keys, buffers: Buffers) -> list[StoreOutcome]:
        try:
            return super().store_all(keys, buffers)
        except OSError:
            return [StoreOutcome.STORED] * len(keys)


class ListsNothingOnAMediumThatIsGone(ReferenceBackend):
    async def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        with suppress(OSError):
            async for batch in super().list_objects():
                yield batch


class DeletesNothingOnAMediumThatIsGone(ReferenceBackend):
    async def delete(self, keys: Keys) -> None:
        with suppress(OSError):
            await super().delete(keys)


class OpensLater(ReferenceBackend):
    async def open(self) -> None:
        self.medium = MEDIA[self.options.medium]
        self.number = next(NUMBERS)


class ClosesWhatItCouldNotOpen(ReferenceBackend):
    opening = False

    async def open(self) -> None:
        self.opening = True
        await super().open()
        self.opening = False

    async def close(self) -> None:
        await super().close()
        if self.opening:
            raise AttributeError("there is no connection")


class RaisesErrorsOfItsOwn(ReferenceBackend):
    def check(self) -> None:
        try:
            super().check()
        except OSError as error:
            raise ConnectionLostError(str(error)) from error


class RaisesErrorsOfItsOwnInLoads(ReferenceBackend):
    async def load_into(self, keys: Keys, buffers: Buffers) -> Sequence[LoadOutcome]:
        try:
            return await super().load_into(keys, buffers)
        except OSError as error:
            raise ConnectionLostError(str(error)) from error


class ConnectionLostError(Exception):
    pass


class NeverRecovers(ReferenceBackend):
    failed = False

    def check(self) -> None:
        try:
            if self.failed:
                raise OSError("the connection is closed")
            super().check()
        except OSError:
            self.failed = True
            raise


class KeepsReservationsOfTheDead(ReferenceBackend):
    def release_dead(self) -> None:
        pass


class KeepsObjectsInOneProcess(ReferenceBackend):
    """The objects of each client that has died were in its own process."""

    @property
    def owners(self) -> dict[ObjectKey, int]:
        owners: dict[ObjectKey, int] = self.medium.__dict__.setdefault("owners", {})
        return owners

    def store_one(self, key: ObjectKey, buffer: memoryview) -> StoreOutcome:
        self.owners[key] = self.number
        return super().store_one(key, buffer)

    def check(self) -> None:
        super().check()
        with self.medium.lock:
            for key in [key for key, number in self.owners.items() if number in self.medium.dead]:
                self.medium.objects.pop(key, None)


class SeesItsOwnProcessOnly(ReferenceBackend):
    """It plays the other process if its threads have the name of the client that dies."""

    async def prepare_load(self, keys: Keys) -> LoadReservation:
        reservation = await super().prepare_load(keys)
        if self.context.name == "dying":
            reservation.present = (False,) * len(keys)
        return reservation


class WritesInTwoTurns(AsyncReference):
    async def store_in_turns(self, keys: Keys, buffers: Buffers) -> list[StoreOutcome]:
        if len(keys) == 1 and len(buffers[0]) == 10_000:
            await super().store_in_turns(keys, [buffer[: len(buffer) // 2] for buffer in buffers])
            await asyncio.sleep(0.001)
        return await super().store_in_turns(keys, buffers)


class CountsStoresCancelledInTurns(AsyncReference):
    async def store(self, keys: Keys, buffers: Buffers) -> Sequence[StoreOutcome]:
        try:
            return await super().store(keys, buffers)
        except asyncio.CancelledError:
            for key, buffer in zip(keys, buffers, strict=True):
                self.medium.reserved[key].append(Reserved(len(buffer)))
            raise


_IS_GONE = "c23_a_medium_that_is_gone_is_no_miss"

BROKEN_MEDIA = [
    backend(
        StoresUnderTheFirstReservation,
        r"C11: 655360 bytes were reserved and not used, 131072 bytes were stored under another one of the key",
        "c11_a_store_uses_the_room_of_its_own_reservation",
    ),
    backend(
        StoresWithoutAReservation,
        r"C11: with 16 objects of 65536 bytes reserved, 1 were stored without a reservation under a limit of 1048576",
        "c11_a_store_without_a_reservation_keeps_the_limit",
    ),
    backend(
        KeepsRoomOfAFailedPreparation,
        r"C10: prepare_store failed at one of its first 4 thread calls each time; 7 objects fit where 16 fitted",
        "c10_a_preparation_that_fails_keeps_nothing",
    ),
    backend(
        KeepsPinsOfAFailedPreparation,
        r"C10: prepare_load of 16 objects failed at one of its first 4 thread calls each time, and the medium evicts",
        "c10_a_preparation_that_fails_keeps_nothing",
    ),
    backend(
        HidesEvictions,
        r"C11: prepare_store of 6 objects evicted [1-9]\d* others on a medium that is not shared, and does not report",
        "c11_prepare_store_reports_the_objects_that_it_evicts",
    ),
    backend(
        ReportsPresentObjectsAsEvicted,
        r"C11: prepare_store reports 2 objects as evicted that are still present",
        "c11_prepare_store_reports_the_objects_that_it_evicts",
    ),
    backend(
        EvictsObjectsOfItsBatch,
        r"C5: prepare_store of 32 objects answered 16 times ALREADY_PRESENT, and 16 of these objects are gone",
        "c05_what_is_already_present_is_not_evicted_by_its_own_batch",
    ),
    backend(
        ForgetsAfterAWhile,
        r"C5: contains \(3 s after it was stored\) returned \[False\]; it should return \[True\]",
        "c05_what_is_stored_does_not_vanish_by_itself",
        watch_seconds=3.0,
    ),
    backend(
        KeepsObjectsInOneProcess,
        r"C5: a process was killed after it had stored an object; a load answered MISS, not HIT",
        "c05_a_process_that_is_killed_sees_objects_and_leaves_its_own",
    ),
    backend(
        SeesItsOwnProcessOnly,
        r"C5: prepare_load in another process returned \[False, False\]; it should return \[True, True\]",
        "c05_a_process_that_is_killed_sees_objects_and_leaves_its_own",
    ),
    backend(
        WritesLargeObjectsInPlace,
        r"C6: while 6291457 equal bytes were stored and deleted, a load answered HIT with \d+ bytes '.*', \d+ bytes '",
        "c06_readers_see_large_objects_whole_while_others_write",
    ),
    backend(
        LoadsLargeObjectsPartByPart,
        r"C6: while 6291457 equal bytes were stored and deleted, a load answered HIT with \d+ bytes '.*', \d+ bytes '",
        "c06_readers_see_large_objects_whole_while_others_write",
    ),
    backend(
        WritesInTwoTurns,
        r"C6: loading an object \d turns of the event loop after its store began answered CORRUPT",
        "c06_between_the_steps_of_a_store_others_see_all_or_nothing",
    ),
    backend(
        CountsStoresCancelledInTurns,
        r"C10: 32 reservations .* was cancelled, .* 0 objects fit where 16 fitted before",
        "c10_stores_that_were_cancelled_give_their_room_back",
    ),
    backend(
        LimitsEachClientByItself,
        r"C11: two clients of one medium were granted \d+ reservations of 65536 bytes at once under a limit of 1048576",
        "c11_clients_keep_one_limit_together",
    ),
    backend(
        IgnoresReservationsOfOthers,
        r"C11: two clients of one medium were granted \d+ reservations of 65536 bytes at once under a limit of 1048576",
        "c11_clients_keep_one_limit_together",
    ),
    backend(
        ListsUnfinishedUploads,
        r"C18: list_objects gave an object that is being stored \d+ bytes; it has 6291457 when it is whole",
        "c18_a_listing_names_no_unfinished_object",
    ),
    backend(
        FindsNothingOnAMediumThatIsGone,
        r"C23: the medium is gone, and contains answered \[False\]; raise an OSError",
        _IS_GONE,
    ),
    backend(
        PreparesNothingOnAMediumThatIsGone,
        r"C23: the medium is gone, and prepare_load answered \(False,\); raise an OSError",
        _IS_GONE,
    ),
    backend(
        MissesOnAMediumThatIsGone,
        r"C23: the medium is gone, and load_into answered \[<LoadOutcome.MISS: 'miss'>\]; raise an OSError",
        _IS_GONE,
    ),
    backend(
        StoresOnAMediumThatIsGone, r"C23: the medium is gone, and store answered STORED; raise an OSError", _IS_GONE
    ),
    backend(
        ListsNothingOnAMediumThatIsGone,
        r"C23: the medium is gone, and list_objects answered \[\]; raise an OSError",
        _IS_GONE,
    ),
    backend(
        DeletesNothingOnAMediumThatIsGone,
        r"C23: the medium is gone, and delete answered without an error; raise an OSError",
        _IS_GONE,
    ),
    backend(
        OpensLater,
        r"C23: open returned while the medium was gone; use the medium in open",
        "c23_open_fails_while_the_medium_is_gone",
    ),
    backend(
        ClosesWhatItCouldNotOpen,
        r"C23: open failed, and close raised AttributeError: there is no connection; it should be harmless",
        "c23_open_fails_while_the_medium_is_gone",
    ),
    backend(
        RaisesErrorsOfItsOwn,
        r"C23: the medium failed, and contains raised ConnectionLostError: .*the medium is gone; raise an OSError",
        "c23_every_error_is_an_os_error",
    ),
    backend(
        RaisesErrorsOfItsOwnInLoads,
        r"C23: the medium failed, and load_into raised ConnectionLostError: .* made to fail .*; raise an OSError",
        "c23_every_error_is_an_os_error",
    ),
    backend(
        NeverRecovers,
        r"C23: 1 s after the medium came back, the client stores and loads nothing",
        "c23_a_medium_that_is_back_serves_again",
        recovery_seconds=1.0,
    ),
    backend(
        KeepsReservationsOfTheDead,
        r"C24: 1 s after a client died (with reservations for|that had pinned) 16 objects, ",
        "c24_the_room_of_a_dead_client_is_given_back",
        "c24_the_pins_of_a_dead_client_are_given_back",
        recovery_seconds=1.0,
    ),
]
