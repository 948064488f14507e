"""The ``disk`` backend.

Each object is one file. With a capacity, an account in the folder keeps the limit for all processes that use it.
Folders have mode 0700 and files 0600: a KV cache holds users' text.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
from collections.abc import AsyncIterator, Sequence

from aiofiles.base import wrap

from offload_backend_disk.capacity.account import Account
from offload_backend_disk.capacity.bounded_folder import BoundedFolder, ReservedCapacity
from offload_backend_disk.capacity.eviction import Limits
from offload_backend_disk.capacity.held_reservations import HeldReservation, HeldReservations
from offload_backend_disk.folder.direct_io import use_direct_io
from offload_backend_disk.folder.mount_guard import MountGuard
from offload_backend_disk.folder.object_folder import ObjectFolder
from offload_backend_disk.folder.processes import Processes
from offload_backend_disk.housekeeping import Housekeeping
from offload_backend_disk.options import DiskOptions
from offload_backend_disk.scan import Scan
from offload_core.api import (
    Backend,
    BackendContext,
    Capabilities,
    LoadCheck,
    LoadOutcome,
    LoadReservation,
    ObjectKey,
    StoredObject,
    StoreOutcome,
    StoreReservation,
    StoreSeal,
)

# aiofiles turns a blocking function into a coroutine function that runs it as one call on the given executor.
_load = wrap(ObjectFolder.load)
_store = wrap(ObjectFolder.store_all)
_store_bounded = wrap(BoundedFolder.store)

_NFS_MARKER = ".offload-core-share"
"""A file in the folder of an ``nfs`` tier. Each of the two backends would remove control files of the other."""


class DiskBackend(Backend[DiskOptions]):
    """One file per object on a local file system."""

    def __init__(self, options: DiskOptions, context: BackendContext) -> None:
        super().__init__(options, context)
        self._log = log = context.logger(__name__)
        self._processes = Processes(options.path, secrets.token_hex(8), log)
        self._mount_guard = MountGuard(options.path, self._processes.recognise_folder)
        is_counted = options.capacity is not None
        self._folder = ObjectFolder(
            self._mount_guard, self._processes, options.fsync, log, options.keep_free, is_counted=is_counted
        )
        self._bounded: BoundedFolder | None = None
        account: Account | None = None
        if options.capacity is not None:
            watermarks = options.high_watermark, options.low_watermark
            limits = Limits(options.capacity, *watermarks, options.keep_free, options.eviction)
            account = Account(self._mount_guard, self._processes, limits, log)
            self._bounded = BoundedFolder(self._folder, account)
        self._scan = Scan(self._folder.layout, self._processes, account, log)
        is_usable = self._bounded.is_usable if self._bounded is not None else bool
        self._housekeeping = Housekeeping(self.run_blocking, self._scan, account, is_usable, log)
        self._held = HeldReservations()

    @property
    def capabilities(self) -> Capabilities:
        """A local disk that other processes may use too."""
        bounded = self._bounded is not None
        return Capabilities(
            medium="disk", persistent=True, shared=True, bounded=bounded, lists=True, sizes=True, spares=bounded
        )

    async def open(self) -> None:
        """Create the folder if it is missing. A read-only folder is no error: its objects can be loaded.

        A cancelled call ends when its thread has ended.
        """
        if await self.run_blocking(self._open):
            self._housekeeping.start()

    def _open(self) -> bool:
        """Return whether the folder needs housekeeping."""
        self._mount_guard.open()
        if os.path.lexists(self.options.path / _NFS_MARKER):
            raise OSError(errno.EEXIST, "the folder belongs to an nfs tier; choose another folder", self.options.path)
        self._processes.check_folders()
        self._folder.direct = use_direct_io(self.options.path, self.options.direct_io, self._log)
        if self._bounded is not None:
            self._bounded.open()
        return self._scan.start() or self._bounded is not None

    async def close(self) -> None:
        """See :meth:`Backend.close`."""
        await self._housekeeping.stop()
        await super().close()
        await self.run_blocking(self._bounded.close if self._bounded is not None else self._processes.unregister)

    async def contains(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        """See :meth:`Backend.contains`."""
        return await self.run_lookup(self._folder.contains, keys)

    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        """Pin the objects that are present. Without a capacity nothing is evicted, so their sizes are enough."""
        bounded = self._bounded
        if bounded is None:
            sizes = await self.run_lookup(self._folder.sizes, keys)
            return LoadReservation([size is not None for size in sizes], nbytes=sizes)
        sizes = []
        try:
            await self.run_lookup(lambda: sizes.extend(bounded.pin(keys)))
        except asyncio.CancelledError:  # the thread has ended nevertheless
            bounded.unpin([key for key, size in zip(keys, sizes, strict=False) if size is not None])
            raise
        pinned = [key for key, size in zip(keys, sizes, strict=True) if size is not None]

        async def release() -> None:
            bounded.unpin(pinned)  # takes microseconds and waits for nothing

        return LoadReservation([size is not None for size in sizes], release, sizes)

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        """See :meth:`Backend.load_into`."""
        return await self.run_to_the_end(_load(self._folder, keys, buffers, executor=self.context.load_executor))

    async def load_and_check(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], checks: Sequence[LoadCheck]
    ) -> Sequence[LoadOutcome]:
        """See :meth:`Backend.load_and_check`."""
        return await self.run_load((self._bounded or self._folder).load_and_check, keys, buffers, checks)

    async def prepare_store(
        self, keys: Sequence[ObjectKey], nbytes: Sequence[int], spare: Sequence[bool] = ()
    ) -> StoreReservation:
        """Reserve capacity in the folder's account; objects are evicted for it in the order of ``eviction``.

        A spare object gets free capacity below ``low_watermark`` only.

        Without a capacity nothing is reserved; :meth:`store` then finds out which objects are present.
        """
        bounded = self._bounded
        if bounded is None and not self.options.keep_free:
            return StoreReservation([None] * len(keys))
        if bounded is None:
            return StoreReservation(await self.run_blocking(self._folder.check_free_space, keys, nbytes))
        answers: list[ReservedCapacity] = []
        try:
            await self.run_blocking(lambda: answers.append(bounded.reserve(keys, nbytes, spare)))
        except asyncio.CancelledError:  # the thread has ended nevertheless
            for answer in answers:
                unused = [number for number in answer.reservations if number is not None]
                await self.run_blocking(bounded.release, unused)
            raise
        (reserved,) = answers
        own: list[tuple[ObjectKey, int]] = []
        flags = spare or [False] * len(keys)
        for key, number, size, is_spare in zip(keys, reserved.reservations, nbytes, flags, strict=True):
            if number is not None:
                self._held.add(key, HeldReservation(number, size, is_spare))
                own.append((key, number))

        async def release() -> None:
            unused = [number for key, number in own if self._held.take(key, number) is not None]
            if unused:
                await self.run_blocking(bounded.release, unused)

        return StoreReservation(reserved.outcomes, reserved.evicted, release)

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        """See :meth:`Backend.store`."""
        return await self._store(keys, buffers, [None] * len(keys))

    async def store_and_seal(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], seals: Sequence[StoreSeal]
    ) -> Sequence[StoreOutcome]:
        """See :meth:`Backend.store_and_seal`."""
        return await self._store(keys, buffers, seals)

    @property
    def seals_stores(self) -> bool:
        """See :attr:`Backend.seals_stores`. A write past the page cache needs the whole object sealed before."""
        return super().seals_stores and not self._folder.direct

    async def _store(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], seals: Sequence[StoreSeal | None]
    ) -> Sequence[StoreOutcome]:
        executor = self.context.executor
        if self._bounded is None:
            return await self.run_to_the_end(_store(self._folder, keys, buffers, seals, executor=executor))
        taken = [self._held.take_smallest(key, len(buffer)) for key, buffer in zip(keys, buffers, strict=True)]
        used: set[int] = set()
        try:
            storing = _store_bounded(self._bounded, keys, buffers, seals, taken, used, executor=executor)
            return await self.run_to_the_end(storing)
        finally:
            for key, reservation in zip(keys, taken, strict=True):
                if reservation is not None and reservation.number not in used:
                    self._held.add(key, reservation)  # until the caller releases it

    async def touch(self, keys: Sequence[ObjectKey], spare: Sequence[bool]) -> None:
        """See :meth:`Backend.touch`. The account learns it within a second, in the background."""
        if self._bounded is not None:
            self._bounded.touch(keys, spare)  # takes microseconds and waits for nothing

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        """See :meth:`Backend.delete`."""
        await self.run_blocking((self._bounded or self._folder).delete, keys)

    async def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        """See :meth:`Backend.list_objects`; one batch per folder of files."""
        for folder in await self.run_blocking(self._folder.folders):
            yield await self.run_blocking(self._folder.objects_in, folder)
