"""The ``disk`` backend.

One file per object, and an account of them by which all processes that use the folder keep its capacity together.
Folders have mode 0700 and files 0600: a KV cache holds users' text.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated

from aiofiles.base import wrap
from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator

from offload_backend_disk import files
from offload_backend_disk.account import Account
from offload_backend_disk.bounded import BoundedFolder, Room
from offload_backend_disk.direct import DirectIo, choose
from offload_backend_disk.folder import ObjectFolder
from offload_core.backend import (
    Backend,
    BackendContext,
    BackendOptions,
    Capabilities,
    LoadOutcome,
    LoadReservation,
    StoredObject,
    StoreOutcome,
    StoreReservation,
)
from offload_core.keys import ObjectKey
from offload_core.quantities import Bytes

# aiofiles turns a blocking function into a coroutine function that runs it as one call on the given executor.
_load = wrap(ObjectFolder.load)
_store = wrap(ObjectFolder.store_all)
_store_bounded = wrap(BoundedFolder.store)


def _word(given: object) -> object:
    """Return what was written: YAML takes a bare ``on`` or ``off`` for a boolean."""
    return {True: "on", False: "off"}[given] if isinstance(given, bool) else given


class DiskOptions(BackendOptions):
    """Options of the ``disk`` type."""

    path: Path = Field(description="folder for the objects; created when its parent exists")
    capacity: Annotated[
        Bytes | None,
        Field(gt=0, description="limit on all objects in the folder, whoever stored them; none by default"),
    ] = None
    low_watermark: Annotated[
        float, Field(gt=0, le=1, description="an eviction goes on until no more than this part of the capacity is used")
    ] = 0.95
    fsync: Annotated[
        files.Fsync,
        Field(description="what is forced to the disk before an object counts as stored: none, data, data and folder"),
    ] = "none"
    direct_io: Annotated[
        DirectIo,
        BeforeValidator(_word),
        WithJsonSchema({"enum": ["off", "on", "auto", False, True]}),
        Field(
            description="read and write past the page cache (O_DIRECT): off, on, or auto, which is on where the "
            "folder's file system can do it"
        ),
    ] = "off"

    @field_validator("path")
    @classmethod
    def _parent_exists(cls, path: Path) -> Path:
        try:
            path = path.expanduser().absolute()
            exists, is_folder, has_parent = path.exists(), path.is_dir(), path.parent.is_dir()
        except (OSError, RuntimeError) as error:  # RuntimeError: ~user for a user that does not exist
            raise ValueError(f"{error}; name a folder that this process may use") from error
        if exists and not is_folder:
            raise ValueError(f"{path} is a file; name a folder")
        if not exists and not has_parent:
            raise ValueError(
                f"the parent folder {path.parent} does not exist; create it, or mount the disk that should be there"
            )
        return path


class DiskBackend(Backend[DiskOptions]):
    """One file per object on a local file system."""

    def __init__(self, options: DiskOptions, context: BackendContext) -> None:
        super().__init__(options, context)
        owner = secrets.token_hex(8)
        self._folder = ObjectFolder(options.path, owner, options.fsync)
        self._bounded: BoundedFolder | None = None
        if options.capacity is not None:
            account = Account(self._folder.layout, owner, options.capacity, options.low_watermark)
            self._bounded = BoundedFolder(self._folder, account)
        self._pinned: dict[ObjectKey, list[int]] = {}
        self._reserved: dict[ObjectKey, list[int]] = {}
        self._scan: asyncio.Task[None] | None = None

    @property
    def capabilities(self) -> Capabilities:
        """A local disk that other processes may use too."""
        bounded = self._bounded is not None
        return Capabilities(medium="disk", persistent=True, shared=True, bounded=bounded, lists=True)

    async def open(self) -> None:
        """Create the folder if it is missing. A read-only one is no error: it can still be loaded from.

        Cancelled, it ends when its thread does.
        """
        await self.run_blocking(files.make_private_folder, self.options.path)
        self._folder.direct = await self.run_blocking(choose, self.options.path, self.options.direct_io)
        if self._bounded is not None:
            folders = await self.run_blocking(self._bounded.open)
            if folders:
                self._scan = asyncio.create_task(self._scan_all(self._bounded, folders))

    async def close(self) -> None:
        """See :meth:`Backend.close`."""
        if self._scan is not None:
            self._scan.cancel()
            await asyncio.wait([self._scan])
        await super().close()
        if self._bounded is not None:
            await self.run_blocking(self._bounded.close)

    async def contains(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        """See :meth:`Backend.contains`."""
        return await self.run_blocking(self._folder.contains, keys)

    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        """Open the files that are there. Without a capacity nothing is evicted: then opening them to read is enough."""
        bounded = self._bounded
        if bounded is None:
            return LoadReservation([True] * len(keys))
        opened: list[int | None] = []
        try:
            await self.run_blocking(lambda: opened.extend(bounded.pin(keys)))
        except asyncio.CancelledError:  # the thread has ended nevertheless
            await self.run_blocking(bounded.unpin, keys[: len(opened)], opened)
            raise
        held = [(key, one) for key, one in zip(keys, opened, strict=True) if one is not None]
        for key, descriptor in held:
            self._pinned.setdefault(key, []).append(descriptor)

        async def release() -> None:
            for key, descriptor in held:
                _take(self._pinned, key, descriptor)
            if held:
                await self.run_blocking(bounded.unpin, keys, opened)

        return LoadReservation([one is not None for one in opened], release)

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        """See :meth:`Backend.load_into`."""
        # Copies, which the thread closes: another call's reservation may be released meanwhile.
        spares = [os.dup(self._pinned[key][-1]) if key in self._pinned else None for key in keys]
        return await self.run_to_the_end(_load(self._folder, keys, buffers, spares, executor=self.context.executor))

    async def prepare_store(self, keys: Sequence[ObjectKey], nbytes: Sequence[int]) -> StoreReservation:
        """Reserve room in the folder's account, evicting what was used longest ago.

        Without a capacity there is nothing to reserve, and what is already present turns out as it is stored.
        """
        bounded = self._bounded
        if bounded is None:
            return StoreReservation([None] * len(keys))
        rooms: list[Room] = []
        try:
            await self.run_blocking(lambda: rooms.append(bounded.reserve(keys, nbytes)))
        except asyncio.CancelledError:  # the thread has ended nevertheless
            for room in rooms:
                await self.run_blocking(bounded.give_back, [one for one in room.reservations if one is not None])
            raise
        (room,) = rooms
        held = [(key, one) for key, one in zip(keys, room.reservations, strict=True) if one is not None]
        for key, reservation in held:
            self._reserved.setdefault(key, []).append(reservation)

        async def release() -> None:
            unused = [one for key, one in held if _take(self._reserved, key, one)]
            if unused:
                await self.run_blocking(bounded.give_back, unused)

        return StoreReservation(room.outcomes, room.evicted, release)

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        """See :meth:`Backend.store`."""
        executor = self.context.executor
        if self._bounded is None:
            return await self.run_to_the_end(_store(self._folder, keys, buffers, executor=executor))
        reservations: list[int | None] = []
        for key in keys:
            reservations.append(self._reserved[key][0] if key in self._reserved else None)
            if reservations[-1] is not None:
                _take(self._reserved, key, reservations[-1])
        used: set[int] = set()
        try:
            storing = _store_bounded(self._bounded, keys, buffers, reservations, used, executor=executor)
            return await self.run_to_the_end(storing)
        finally:
            for key, reservation in zip(keys, reservations, strict=True):
                if reservation is not None and reservation not in used:
                    self._reserved.setdefault(key, []).append(reservation)  # for its release to give back

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        """See :meth:`Backend.delete`."""
        for key in keys:
            self._pinned.pop(key, None)  # deleted, not evicted: no spare of it is wanted; its reservation closes it
        await self.run_blocking((self._bounded or self._folder).delete, keys)

    async def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        """See :meth:`Backend.list_objects`; one batch per folder of files."""
        for folder in await self.run_blocking(self._folder.folders):
            yield await self.run_blocking(self._folder.objects_in, folder)

    async def _scan_all(self, bounded: BoundedFolder, folders: Sequence[Path]) -> None:
        """Bring the account in line, a folder at a time, so that other calls get their turn."""
        for folder in folders:
            await self.run_blocking(bounded.scan, folder, last=folder is folders[-1])


def _take(held: dict[ObjectKey, list[int]], key: ObjectKey, one: int) -> bool:
    """Take ``one`` out of what is held under ``key``; returns whether it was there."""
    if one not in held.get(key, ()):
        return False
    held[key].remove(one)
    if not held[key]:
        del held[key]
    return True
