"""Backends that break a clause about buffers, the event loop, capacity or options, each in one way and no other."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from offload_core.api.backend import BackendContext, LoadOutcome, StoredObject, StoreOutcome, StoreReservation
from offload_core.api.cancellation import to_the_end
from offload_core.api.keys import ObjectKey
from tests.testing.contract.reference import ReferenceBackend, ReferenceOptions, Reserved, ReservedStore

Keys = Sequence[ObjectKey]
Buffers = Sequence[memoryview]
MIB = 1024 * 1024


class WorksBehindTheAnswer(ReferenceBackend):
    """Its ``close`` waits for all of it."""

    late: asyncio.Future[Any] | None = None

    async def close(self) -> None:
        await super().close()
        for _ in range(10):  # the call whose thread has just ended begins its late work a turn of the loop later
            await asyncio.sleep(0)
        if self.late is not None:
            await asyncio.wait({self.late})


class LoadsAgainBehindTheAnswer(WorksBehindTheAnswer):
    async def load_into(self, keys: Keys, buffers: Buffers) -> Sequence[LoadOutcome]:
        outcomes = await super().load_into(keys, buffers)
        self.late = asyncio.ensure_future(self.run_blocking(self.load_all, keys, buffers))
        return outcomes


class StoresAgainBehindTheAnswer(WorksBehindTheAnswer):
    async def store(self, keys: Keys, buffers: Buffers) -> Sequence[StoreOutcome]:
        outcomes = await super().store(keys, buffers)
        self.late = asyncio.ensure_future(self.run_blocking(self.again, keys, buffers))
        return outcomes

    def again(self, keys: Keys, buffers: Buffers) -> None:
        with self.medium.lock:
            for key, buffer in zip(keys, buffers, strict=True):
                found = self.medium.objects.get(key)
                if found is not None and len(found.content) == len(buffer):
                    found.content = bytes(buffer)


class LoadsEachKeyByItself(ReferenceBackend):
    async def load_into(self, keys: Keys, buffers: Buffers) -> Sequence[LoadOutcome]:
        return await asyncio.gather(*map(self.load_one, keys, buffers))

    async def load_one(self, key: ObjectKey, buffer: memoryview) -> LoadOutcome:
        self.check()
        return await self.run_blocking(self.load, key, buffer)


class StoresEachKeyByItself(ReferenceBackend):
    async def store(self, keys: Keys, buffers: Buffers) -> Sequence[StoreOutcome]:
        return await asyncio.gather(*map(self.store_by_itself, keys, buffers))

    async def store_by_itself(self, key: ObjectKey, buffer: memoryview) -> StoreOutcome:
        self.check()
        return await self.run_blocking(self.store_one, key, buffer)


class LeavesLoadsToThemselves(ReferenceBackend):
    async def load_into(self, keys: Keys, buffers: Buffers) -> Sequence[LoadOutcome]:
        return await asyncio.shield(super().load_into(keys, buffers))


class LeavesStoresToThemselves(ReferenceBackend):
    async def store(self, keys: Keys, buffers: Buffers) -> Sequence[StoreOutcome]:
        return await asyncio.shield(super().store(keys, buffers))


class OpensAFileOnTheLoop(ReferenceBackend):
    async def load_into(self, keys: Keys, buffers: Buffers) -> Sequence[LoadOutcome]:
        with Path(os.devnull).open():  # noqa: ASYNC230 - that is what is wrong with it
            return await super().load_into(keys, buffers)


class LooksAtEveryByteOnTheLoop(ReferenceBackend):
    async def load_into(self, keys: Keys, buffers: Buffers) -> Sequence[LoadOutcome]:
        end = time.thread_time() + 0.15 * (max(map(len, buffers), default=0) >= MIB)
        while time.thread_time() < end:
            pass
        return await super().load_into(keys, buffers)


class HashesOnTheLoop(ReferenceBackend):
    async def store(self, keys: Keys, buffers: Buffers) -> Sequence[StoreOutcome]:
        self.digests = [hashlib.sha256(buffer).digest() for buffer in buffers]
        return await super().store(keys, buffers)


class AsksTheFileSystemOnTheLoop(ReferenceBackend):
    async def store(self, keys: Keys, buffers: Buffers) -> Sequence[StoreOutcome]:
        os.statvfs("/")
        return await super().store(keys, buffers)


class WaitsForAnEventOnTheLoop(ReferenceBackend):
    async def load_into(self, keys: Keys, buffers: Buffers) -> Sequence[LoadOutcome]:
        threading.Event().wait(0.0001)
        return await super().load_into(keys, buffers)


class TalksToAServerOnTheLoop(ReferenceBackend):
    async def contains(self, keys: Keys) -> Sequence[bool]:
        client, server = socket.socketpair()
        with client, server:
            client.sendall(b"EXISTS")
            server.recv(6)
        return await super().contains(keys)


class WaitsForALockOnTheLoop(ReferenceBackend):
    async def open(self) -> None:
        await super().open()
        self.storing = threading.Lock()

    def store_all(self, keys: Keys, buffers: Buffers) -> list[StoreOutcome]:
        with self.storing:
            time.sleep(0.25 * (max(map(len, buffers), default=0) >= MIB))
            return super().store_all(keys, buffers)

    async def contains(self, keys: Keys) -> Sequence[bool]:
        with self.storing:
            return await super().contains(keys)


class EvictsWhatIsPinned(ReferenceBackend):
    async def prepare_store(self, keys: Keys, nbytes: Sequence[int], spare: Sequence[bool] = ()) -> StoreReservation:
        self.medium.pins.clear()
        return await super().prepare_store(keys, nbytes, spare)


class UnpinsForEverybody(ReferenceBackend):
    def unpin(self, keys: Keys) -> None:
        for key in keys:
            self.medium.pins[key] = 0


class CannotReleaseAfterAnError(ReferenceBackend):
    failed = False

    async def store(self, keys: Keys, buffers: Buffers) -> Sequence[StoreOutcome]:
        self.failed = True
        outcomes = await super().store(keys, buffers)
        self.failed = False
        return outcomes

    def give_back(self, granted: Sequence[tuple[ObjectKey, Reserved]]) -> None:
        super().give_back(granted)
        if self.failed:
            self.failed = False
            raise RuntimeError("the transaction has ended already")


class GivesBackWhatWasStoredOnly(ReferenceBackend):
    async def open(self) -> None:
        await super().open()
        self.used: set[ObjectKey] = set()

    async def store(self, keys: Keys, buffers: Buffers) -> Sequence[StoreOutcome]:
        self.used |= set(keys)
        return await super().store(keys, buffers)

    def give_back(self, granted: Sequence[tuple[ObjectKey, Reserved]]) -> None:
        is_dead = self.number in self.medium.dead
        super().give_back([(key, reserved) for key, reserved in granted if is_dead or key in self.used])


class CountsFailedStores(ReferenceBackend):
    async def store(self, keys: Keys, buffers: Buffers) -> Sequence[StoreOutcome]:
        try:
            return await super().store(keys, buffers)
        except OSError:
            self.keep_reserved(keys, buffers)
            raise

    def keep_reserved(self, keys: Keys, buffers: Buffers) -> None:
        for key, buffer in zip(keys, buffers, strict=True):
            self.medium.reserved[key].append(Reserved(len(buffer)))


class CountsCancelledStores(CountsFailedStores):
    async def store(self, keys: Keys, buffers: Buffers) -> Sequence[StoreOutcome]:
        try:
            return await ReferenceBackend.store(self, keys, buffers)
        except asyncio.CancelledError:
            self.keep_reserved(keys, buffers)
            raise


class CountsDeletedObjects(ReferenceBackend):
    async def delete(self, keys: Keys) -> None:
        for key in keys if len(keys) < 3 else ():
            found = self.medium.objects.get(key)
            if found is not None:
                self.medium.reserved[key].append(Reserved(found.nbytes))
        await super().delete(keys)


class NeverUnpins(ReferenceBackend):
    def unpin(self, keys: Keys) -> None:
        if self.number in self.medium.dead:
            super().unpin(keys)


class CountsStoredBytesOnly(ReferenceBackend):
    async def prepare_store(self, keys: Keys, nbytes: Sequence[int], spare: Sequence[bool] = ()) -> StoreReservation:
        self.medium.reserved.clear()
        return await super().prepare_store(keys, nbytes, spare)


class CountsABatchAtItsEnd(ReferenceBackend):
    batch: Keys = ()

    def kept_for(self, keys: Keys) -> list[ObjectKey]:
        return super().kept_for(self.batch)

    async def prepare_store(self, keys: Keys, nbytes: Sequence[int], spare: Sequence[bool] = ()) -> StoreReservation:
        self.batch = keys
        reservations = []
        hidden: list[tuple[ObjectKey, Reserved]] = []
        for key, size, is_spare in zip(keys, nbytes, spare or [False] * len(keys), strict=True):
            reservations.append(await super().prepare_store([key], [size], [is_spare]))
            if self.medium.reserved[key]:
                hidden.append((key, self.medium.reserved[key].pop()))
        for key, reserved in hidden:
            self.medium.reserved[key].append(reserved)

        def release() -> None:
            for reservation in reservations:
                assert isinstance(reservation, ReservedStore)
                reservation._release()

        outcomes = [outcome for reservation in reservations for outcome in reservation.outcomes]
        return ReservedStore(outcomes, [key for one in reservations for key in one.evicted], release)


class GivesGrantedRoomAway(ReferenceBackend):
    def store_one(self, key: ObjectKey, buffer: memoryview) -> StoreOutcome:
        if self.options.capacity and sum(map(len, self.medium.reserved.values())) > 2:
            return StoreOutcome.REJECTED
        return super().store_one(key, buffer)


class LoadsOnThreadsThatCloseDoesNotKnow(ReferenceBackend):
    async def load_into(self, keys: Keys, buffers: Buffers) -> Sequence[LoadOutcome]:
        loop = asyncio.get_running_loop()
        return await to_the_end(loop.run_in_executor(self.context.executor, self.load_all, keys, buffers))


class StoresOnThreadsThatCloseDoesNotKnow(ReferenceBackend):
    async def store(self, keys: Keys, buffers: Buffers) -> Sequence[StoreOutcome]:
        return await to_the_end(asyncio.to_thread(self.store_all, keys, buffers))


class DeletesOnThreadsThatCloseDoesNotKnow(ReferenceBackend):
    async def delete(self, keys: Keys) -> None:
        self.check()
        await asyncio.to_thread(self.pop_all, keys)

    def pop_all(self, keys: Keys) -> None:
        with self.medium.lock:
            for key in keys:
                self.medium.objects.pop(key, None)


class LooksUpOnThreadsThatCloseDoesNotKnow(ReferenceBackend):
    async def contains(self, keys: Keys) -> Sequence[bool]:
        self.check()
        return await asyncio.to_thread(lambda: [key in self.medium.objects for key in keys])


class ListsOnThreadsThatCloseDoesNotKnow(ReferenceBackend):
    async def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        await asyncio.to_thread(self.check)
        async for batch in super().list_objects():
            yield batch


class LeavesATaskBehind(ReferenceBackend):
    async def open(self) -> None:
        await super().open()
        self.renewing = asyncio.ensure_future(self.renew_leases())

    async def renew_leases(self) -> None:
        await asyncio.Event().wait()


class CancelsWhatRunsAtClose(ReferenceBackend):
    async def open(self) -> None:
        await super().open()
        self.tasks: set[asyncio.Task[Any]] = set()

    async def load_into(self, keys: Keys, buffers: Buffers) -> Sequence[LoadOutcome]:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            return await super().load_into(keys, buffers)
        finally:
            self.tasks.discard(task)

    async def close(self) -> None:
        for task in getattr(self, "tasks", ()):
            task.cancel()
        await super().close()


class FailsWhatRunsAtClose(ReferenceBackend):
    closed = False

    async def store(self, keys: Keys, buffers: Buffers) -> Sequence[StoreOutcome]:
        await self.run_blocking(int)
        if self.closed:
            raise OSError(errno.EBADF, "the tier is closed")
        return await super().store(keys, buffers)

    async def close(self) -> None:
        self.closed = True
        await super().close()


class ClosesOnce(ReferenceBackend):
    closed = False

    async def close(self) -> None:
        await super().close()
        if self.closed:
            raise ValueError("closed already")
        self.closed = True


class ClosesWhatItNeverOpened(ReferenceBackend):
    async def close(self) -> None:
        await super().close()
        self.medium.pins.clear()


class OpensInTheConstructor(ReferenceBackend):
    def __init__(self, options: ReferenceOptions, context: BackendContext) -> None:
        super().__init__(options, context)
        with Path(os.devnull).open():
            pass


class StartsAThreadInTheConstructor(ReferenceBackend):
    def __init__(self, options: ReferenceOptions, context: BackendContext) -> None:
        super().__init__(options, context)
        self.done = threading.Event()
        threading.Thread(target=self.done.wait, args=(5,), name="reaper", daemon=True).start()


class NeedsALoopInTheConstructor(ReferenceBackend):
    def __init__(self, options: ReferenceOptions, context: BackendContext) -> None:
        super().__init__(options, context)
        self.loop = asyncio.get_running_loop()


class LaxOptions(ReferenceOptions):
    model_config = ConfigDict(extra="ignore")


class BareOptions(ReferenceOptions):
    retries: int = 3


class TalkativeOptions(ReferenceOptions):
    access_key: str | None = Field(default=None, description="key of the server")


class Clock:
    pass


class OddOptions(ReferenceOptions):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    clock: Clock | None = Field(default=None, description="time of the clock")
