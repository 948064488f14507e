"""The ``disk`` backend.

One file per object, and an account of them by which all processes that use the folder keep its capacity together.
Folders have mode 0700 and files 0600: a KV cache holds users' text.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated

from aiofiles.base import wrap
from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator

from offload_backend_disk.capacity.account import Account
from offload_backend_disk.capacity.bounded_folder import BoundedFolder, Room
from offload_backend_disk.capacity.eviction import Limits, Policy
from offload_backend_disk.capacity.processes import Owners
from offload_backend_disk.folder import files
from offload_backend_disk.folder.direct_io import DirectIo, choose
from offload_backend_disk.folder.mount_guard import Home
from offload_backend_disk.folder.object_folder import ObjectFolder
from offload_backend_disk.housekeeping import Keeper
from offload_backend_disk.scan import Sweep
from offload_core.api import (
    Backend,
    BackendContext,
    BackendOptions,
    Bytes,
    Capabilities,
    LoadOutcome,
    LoadReservation,
    ObjectKey,
    StoredObject,
    StoreOutcome,
    StoreReservation,
    check_folder,
)

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
    high_watermark: Annotated[
        float, Field(gt=0, le=1, description="an eviction begins when a store would exceed this part of the capacity")
    ] = 1.0
    low_watermark: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            validate_default=True,
            description="an eviction goes on until no more than this part of the capacity is used",
        ),
    ] = 0.95
    keep_free: Annotated[
        Bytes,
        Field(
            description="what stores leave free on the file system: with a capacity by evicting, and then by being "
            "rejected; without one by being rejected"
        ),
    ] = 0
    eviction: Annotated[
        Policy,
        Field(
            description="what goes first: lru, what was used longest ago; slru, what was never used since it was "
            "stored, and only then what was used longest ago"
        ),
    ] = "lru"
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
        except (OSError, RuntimeError) as error:  # RuntimeError: ~user for a user that does not exist
            raise ValueError(f"{error}; name a folder that this process may use") from error
        check_folder(path, "create it, or mount the disk that should be there")
        return path

    @field_validator("low_watermark")
    @classmethod
    def _is_not_above_the_high_one(cls, low: float, info: ValidationInfo) -> float:
        high = info.data.get("high_watermark", 1.0)
        if low > high:
            raise ValueError(
                f"low_watermark ({low}) is above high_watermark ({high}); an eviction begins at the high one and ends "
                f"at the low one, so give a low_watermark of at most {high}"
            )
        return low


class DiskBackend(Backend[DiskOptions]):
    """One file per object on a local file system."""

    def __init__(self, options: DiskOptions, context: BackendContext) -> None:
        super().__init__(options, context)
        self._owners = Owners(options.path, secrets.token_hex(8))
        home = Home(options.path, self._owners.file)
        self._home = home
        self._folder = ObjectFolder(home, self._owners, options.fsync, options.keep_free)
        self._bounded: BoundedFolder | None = None
        account: Account | None = None
        if options.capacity is not None:
            watermarks = options.high_watermark, options.low_watermark
            limits = Limits(options.capacity, *watermarks, options.keep_free, options.eviction)
            account = Account(home, self._owners, limits)
            self._bounded = BoundedFolder(self._folder, account)
        self._sweep = Sweep(self._folder.layout, self._owners, account)
        is_usable = self._bounded.is_usable if self._bounded is not None else bool
        self._keeper = Keeper(self.run_blocking, self._sweep, account, is_usable)
        self._reserved: dict[ObjectKey, dict[int, int]] = {}  # by reservation, the bytes that it is for

    @property
    def capabilities(self) -> Capabilities:
        """A local disk that other processes may use too."""
        bounded = self._bounded is not None
        return Capabilities(medium="disk", persistent=True, shared=True, bounded=bounded, lists=True, sizes=True)

    async def open(self) -> None:
        """Create the folder if it is missing. A read-only one is no error: it can still be loaded from.

        Cancelled, it ends when its thread does.
        """
        if await self.run_blocking(self._open):
            self._keeper.start()

    def _open(self) -> bool:
        """Return whether there is anything to do in the background."""
        self._home.open()
        self._folder.direct = choose(self.options.path, self.options.direct_io)
        if self._bounded is not None:
            self._bounded.open()
        return self._sweep.begin() or self._bounded is not None

    async def close(self) -> None:
        """See :meth:`Backend.close`."""
        await self._keeper.stop()
        await super().close()
        await self.run_blocking(self._bounded.close if self._bounded is not None else self._owners.drop)

    async def contains(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        """See :meth:`Backend.contains`."""
        return await self.run_blocking(self._folder.contains, keys)

    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        """Pin what is there. Without a capacity nothing is evicted: then sizes are enough."""
        bounded = self._bounded
        if bounded is None:
            sizes = await self.run_blocking(self._folder.sizes, keys)
            return LoadReservation([size is not None for size in sizes], nbytes=sizes)
        sizes = []
        try:
            await self.run_blocking(lambda: sizes.extend(bounded.pin(keys)))
        except asyncio.CancelledError:  # the thread has ended nevertheless
            bounded.unpin([key for key, size in zip(keys, sizes, strict=False) if size is not None])
            raise
        held = [key for key, size in zip(keys, sizes, strict=True) if size is not None]

        async def release() -> None:
            bounded.unpin(held)  # some microseconds; nothing in it waits

        return LoadReservation([size is not None for size in sizes], release, sizes)

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        """See :meth:`Backend.load_into`."""
        return await self.run_to_the_end(_load(self._folder, keys, buffers, executor=self.context.executor))

    async def prepare_store(self, keys: Sequence[ObjectKey], nbytes: Sequence[int]) -> StoreReservation:
        """Reserve room in the folder's account, evicting what is to go first.

        Without a capacity there is nothing to reserve, and what is already present turns out as it is stored.
        """
        bounded = self._bounded
        if bounded is None and not self.options.keep_free:
            return StoreReservation([None] * len(keys))
        if bounded is None:
            return StoreReservation(await self.run_blocking(self._folder.reserve, keys, nbytes))
        rooms: list[Room] = []
        try:
            await self.run_blocking(lambda: rooms.append(bounded.reserve(keys, nbytes)))
        except asyncio.CancelledError:  # the thread has ended nevertheless
            for room in rooms:
                await self.run_blocking(bounded.give_back, [one for one in room.reservations if one is not None])
            raise
        (room,) = rooms
        held = [(key, one) for key, one in zip(keys, room.reservations, strict=True) if one is not None]
        for key, reservation, size in zip(keys, room.reservations, nbytes, strict=True):
            if reservation is not None:
                self._reserved.setdefault(key, {})[reservation] = size

        async def release() -> None:
            unused = [one for key, one in held if _take(self._reserved, key, one) is not None]
            if unused:
                await self.run_blocking(bounded.give_back, unused)

        return StoreReservation(room.outcomes, room.evicted, release)

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        """See :meth:`Backend.store`."""
        executor = self.context.executor
        if self._bounded is None:
            return await self.run_to_the_end(_store(self._folder, keys, buffers, executor=executor))
        reservations: list[int | None] = []
        sizes: dict[int, int] = {}
        for key, buffer in zip(keys, buffers, strict=True):
            # Several calls may have reserved room for one key: the smallest that is enough, or one takes another's.
            fitting = [(size, one) for one, size in self._reserved.get(key, {}).items() if size >= len(buffer)]
            size, reservation = min(fitting, default=(0, None))
            reservations.append(reservation)
            if reservation is not None:
                _take(self._reserved, key, reservation)
                sizes[reservation] = size
        used: set[int] = set()
        try:
            storing = _store_bounded(self._bounded, keys, buffers, reservations, used, executor=executor)
            return await self.run_to_the_end(storing)
        finally:
            for key, reservation in zip(keys, reservations, strict=True):
                if reservation is not None and reservation not in used:
                    self._reserved.setdefault(key, {})[reservation] = sizes[reservation]  # for its release to give back

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        """See :meth:`Backend.delete`."""
        await self.run_blocking((self._bounded or self._folder).delete, keys)

    async def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        """See :meth:`Backend.list_objects`; one batch per folder of files."""
        for folder in await self.run_blocking(self._folder.folders):
            yield await self.run_blocking(self._folder.objects_in, folder)


def _take(held: dict[ObjectKey, dict[int, int]], key: ObjectKey, one: int) -> int | None:
    """Take ``one`` out of what is held under ``key``; returns what it is for, or ``None`` where it is not there."""
    size = held.get(key, {}).pop(one, None)
    if key in held and not held[key]:
        del held[key]
    return size
