"""The ``nfs`` backend: the contract's coroutines, each a few calls on the tier's threads.

An object is one thread call, and those of a batch run at once as far as the tier has threads. A call that fails for a
passing reason is tried again on its thread (:mod:`offload_backend_nfs.storage.retry`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import fsspec
from aiofiles.base import wrap

from offload_backend_nfs.capacity.bounded_store import BoundedPlace
from offload_backend_nfs.capacity.lease import AccountOptions
from offload_backend_nfs.capacity.medium_adapter import AccountMedium
from offload_backend_nfs.capacity.reservations import BoundedTier
from offload_backend_nfs.lookup_cache import KnownKeys
from offload_backend_nfs.options import NfsOptions
from offload_backend_nfs.storage import layout
from offload_backend_nfs.storage.base import Medium
from offload_backend_nfs.storage.fsspec_store import ObjectStore, RenamingStore
from offload_backend_nfs.storage.posix import PosixShare
from offload_backend_nfs.storage.retry import Retrier
from offload_backend_nfs.storage.s3 import S3Store, s3_options
from offload_core.api import (
    Backend,
    BackendContext,
    Capabilities,
    LoadOutcome,
    LoadReservation,
    ObjectKey,
    StoredObject,
    StoreOutcome,
    StoreReservation,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

_DELETE_BATCH = 1000


class NfsBackend(Backend[NfsOptions]):
    """Objects on storage that many hosts share.

    Lookups are answered from what this process knows for ``lookup_cache_seconds``. Loads always ask the medium.
    """

    def __init__(self, options: NfsOptions, context: BackendContext) -> None:
        super().__init__(options, context)
        self._medium: Medium | None = None
        self._retrier = Retrier(options.retry_seconds)
        place = json.dumps([options.url, options.storage_options], sort_keys=True, default=str)
        self._known = KnownKeys.of_place(place)
        self._sweeping: asyncio.Task[None] | None = None
        self._place: BoundedPlace | None = None
        self._bounded: BoundedTier | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Remote storage that other processes use too."""
        bounded = self.options.capacity is not None
        return Capabilities(medium="remote", persistent=True, shared=True, bounded=bounded, lists=True, sizes=True)

    @property
    def medium(self) -> Medium:
        """The storage.

        Raises:
            OSError: before ``open``.
        """
        if self._medium is None:
            raise OSError(f"tier {self.context.name!r} is not open")
        return self._medium

    async def open(self) -> None:
        """Connect, and remove in the background what killed writers left. A read-only place is no error.

        Cancelled, what was begun is ended first; ``close`` lets go of it.
        """
        await self.run_blocking(self._open)
        if self.options.capacity is not None:
            self._place = self._make_place(self.options.capacity)
            await self.run_blocking(self._place.open)
            self._bounded = BoundedTier(self._place, self.run_blocking)
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep())

    async def close(self) -> None:
        """See :meth:`Backend.close`. Waits between tries end at once. Cancelled, it stops waiting."""
        self._retrier.stop()
        if self._bounded is not None:
            bounded, self._bounded = self._bounded, None
            await bounded.close()
        if self._place is not None:
            place, self._place = self._place, None
            await self.run_blocking(place.close)
        await super().close()
        if self._sweeping is not None:
            await asyncio.wait([self._sweeping])
        if self._medium is not None:
            medium, self._medium = self._medium, None
            await self.run_blocking(medium.close)

    async def contains(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        """See :meth:`Backend.contains`; asks only for what this process does not know."""
        life = self.options.lookup_cache_seconds
        known = dict(zip(keys, self._known.recall(keys, life), strict=True))
        sizes = await self._look_for([key for key, present in known.items() if present is None])
        known.update((key, size is not None) for key, size in sizes.items())
        if self._bounded is not None:
            leaving = self._bounded.place.hidden(keys)
            return [bool(known[key]) and not hidden for key, hidden in zip(keys, leaving, strict=True)]
        return [bool(known[key]) for key in keys]

    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        """Say what is there and how large it is, and pin it where there is a capacity.

        Sizes that this process does not know are asked for. Cancelled, nothing stays pinned.
        """
        if self._bounded is not None:
            return await self._bounded.prepare_load(keys, self._sizes)
        sizes = await self._sizes(keys)
        return LoadReservation([size is not None for size in sizes], nbytes=sizes)

    async def prepare_store(self, keys: Sequence[ObjectKey], nbytes: Sequence[int]) -> StoreReservation:
        """Take room, where there is a capacity. Cancelled, it is given back."""
        if self._bounded is not None:
            return await self._bounded.prepare_store(keys, nbytes)
        return await super().prepare_store(keys, nbytes)

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        """See :meth:`Backend.load_into`. Cancelled, it waits for the reads that have begun."""
        return await self._each(self._load, keys, buffers)

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        """See :meth:`Backend.store`. Cancelled, it waits for the writes that have begun."""
        if self._bounded is not None:
            return await self._bounded.store(keys, buffers, self._each)
        return await self._each(self._store, keys, buffers)

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        """See :meth:`Backend.delete`. Cancelled, it waits for the requests that have begun."""
        for start in range(0, len(keys), _DELETE_BATCH):
            delete = self._delete if self._bounded is None else self._bounded.place.delete
            await self.run_blocking(delete, keys[start : start + _DELETE_BATCH])

    async def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        """See :meth:`Backend.list_objects`; one batch per folder of objects. Cancellation has no effect."""
        folders = [""]
        for pattern in layout.FOLDERS:
            above, folders = folders, []
            for folder in above:
                found = await self._entries(folder)
                names = (entry.name for entry in found if entry.is_folder and pattern.fullmatch(entry.name))
                folders += [f"{folder}/{name}".lstrip("/") for name in names]
        for folder in folders:
            yield layout.objects_in(folder, await self._entries(folder))

    async def _entries(self, folder: str) -> Any:
        return await self.run_blocking(self._retrier.call, self.medium.entries, folder)

    async def _sweep(self) -> None:
        """Remove leftovers; a failure is only logged."""
        try:
            count = await self.run_blocking(self.medium.sweep, lambda: self._retrier.stopped)
        except Exception as error:
            logger.info(
                "tier %r: cannot look for what killed writers left at %s: %s",
                self.context.name,
                self.options.url,
                error,
            )
        else:
            if count:
                logger.info("tier %r: removed %d leftovers of killed writers", self.context.name, count)

    async def _sizes(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Return the sizes of objects, ``None`` where there is none. Cancelled, it waits for what it has begun."""
        sizes = dict(zip(keys, self._known.recall_sizes(keys, self.options.lookup_cache_seconds), strict=True))
        sizes.update(await self._look_for([key for key, size in sizes.items() if size is None]))
        return [sizes[key] for key in keys]

    async def _look_for(self, keys: Sequence[ObjectKey]) -> dict[ObjectKey, int | None]:
        """Ask the medium for the sizes of objects, in batches. Cancelled, it waits for the requests that have begun."""
        size = self.medium.lookup_batch
        batches = [keys[start : start + size] for start in range(0, len(keys), size)]
        answers = await self._all(self.run_blocking(self._look, batch) for batch in batches)
        return {
            key: answer
            for batch, found in zip(batches, answers, strict=True)
            for key, answer in zip(batch, found, strict=True)
        }

    async def _each(self, work: Callable[..., T], *objects: Sequence[Any]) -> list[T]:
        """Run ``work`` on every object, each in one thread call, as many at once as there are threads."""
        call = wrap(work)  # of aiofiles: a coroutine function that makes one call on the given executor
        return await self._all(call(*one, executor=self.context.executor) for one in zip(*objects, strict=True))

    async def _all(self, calls: Iterable[Awaitable[T]]) -> list[T]:
        """Await all calls to their real end, cancelled or not (C7), and raise the first error."""
        done = await self.run_to_the_end(asyncio.gather(*calls, return_exceptions=True))
        results: list[T] = []
        for result in done:
            if isinstance(result, BaseException):
                raise result
            results.append(result)
        return results

    # What follows runs on the tier's threads.

    def _open(self) -> None:
        self._medium = make_medium(self.options)
        self._retrier.call(self._medium.open)

    def _make_place(self, capacity_bytes: int) -> BoundedPlace:
        options = self.options
        medium = AccountMedium(self.medium, self._retrier, self._known, options.lookup_cache_seconds)
        account = AccountOptions(
            capacity_bytes=capacity_bytes,
            low_watermark=options.low_watermark,
            high_watermark=options.high_watermark,
            grace_seconds=options.eviction_grace,
            lease_seconds=options.lease_seconds,
        )
        return BoundedPlace(medium, medium, account, stopped=lambda: self._retrier.stopped)

    def _look(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        asked = time.monotonic()
        sizes = self._retrier.call(self.medium.sizes, list(map(layout.name_of, keys)))
        for key, size in zip(keys, sizes, strict=True):
            self._known.saw(key, size is not None, asked, size)
        return sizes

    def _load(self, key: ObjectKey, buffer: memoryview) -> LoadOutcome:
        asked = time.monotonic()
        outcome = self._retrier.call(self.medium.load, layout.name_of(key), buffer)
        self._known.saw(
            key, outcome is not LoadOutcome.MISS, asked, len(buffer) if outcome is LoadOutcome.HIT else None
        )
        return outcome

    def _store(self, key: ObjectKey, buffer: memoryview) -> StoreOutcome:
        began = time.monotonic()
        present: bool | None = None
        try:
            self._retrier.call(self.medium.store, layout.name_of(key), buffer)
            present = True
        finally:
            self._known.changed(key, present, began, len(buffer) if present else None)
        return StoreOutcome.STORED

    def _delete(self, keys: Sequence[ObjectKey]) -> None:
        began = time.monotonic()
        present: bool | None = None
        try:
            self._retrier.call(self.medium.delete, list(map(layout.name_of, keys)))
            present = False
        finally:
            for key in keys:
                self._known.changed(key, present, began)


def make_medium(options: NfsOptions) -> Medium:
    """Return the medium of a URL, not yet open. May import packages and read fsspec's configuration."""
    if options.kind == "share":
        return PosixShare(options.folder)
    given = dict(options.storage_options)
    if options.kind == "s3":
        fs, root = _file_system(options.url, s3_options(given, options.retry_seconds))
        return S3Store(fs, root, options.part_size)
    fs, root = _file_system(options.url, given)
    return RenamingStore(fs, root) if options.kind == "renaming" else ObjectStore(fs, root)


def _file_system(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    """Return an fsspec file system that caches nothing and is nobody else's, and the root in its words."""
    fs, root = fsspec.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **options)
    return fs, str(root)
