"""The ``nfs`` backend: the contract's coroutines, each a few calls on the tier's threads.

The objects of a batch are shared out among the tier's threads, and each thread moves one object after the other. After
a transient error, an object is retried on its thread (:mod:`offload_backend_nfs.storage.retry`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

import fsspec

from offload_backend_nfs.capacity.account_options import AccountOptions
from offload_backend_nfs.capacity.bounded_store import BoundedStore
from offload_backend_nfs.capacity.reservations import ReservationManager
from offload_backend_nfs.lookup_cache import LookupCache
from offload_backend_nfs.medium_adapter import MediumAdapter
from offload_backend_nfs.object_batch import ObjectBatch
from offload_backend_nfs.options import NfsOptions
from offload_backend_nfs.storage import layout
from offload_backend_nfs.storage.base import Medium
from offload_backend_nfs.storage.failures import StoreRejections, UnreadableObjectError
from offload_backend_nfs.storage.fsspec_store import ObjectStore, RenamingStore
from offload_backend_nfs.storage.posix import PosixShare
from offload_backend_nfs.storage.retry import Retrier
from offload_backend_nfs.storage.s3 import S3Store, s3_options
from offload_backend_nfs.unreadable_objects import UnreadableObjects
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

T = TypeVar("T")

_DELETE_BATCH = 1000
_ONE_TRY = Retrier(0)


class NfsBackend(Backend[NfsOptions]):
    """Objects on storage that many hosts share.

    Lookups are cached for ``lookup_cache_seconds``. Loads always ask the medium.
    """

    def __init__(self, options: NfsOptions, context: BackendContext) -> None:
        super().__init__(options, context)
        self._medium: Medium | None = None
        self._retrier = Retrier(options.retry_seconds)
        storage = json.dumps([options.url, options.storage_options], sort_keys=True, default=str)
        self._lookup_cache = LookupCache.shared(storage)
        self._leftovers_removal: asyncio.Task[None] | None = None
        self._bounded_store: BoundedStore | None = None
        self._reservations: ReservationManager | None = None
        self._log = context.logger(__name__)
        self._rejections = StoreRejections(self._log)
        self._unreadable = UnreadableObjects(self._log)
        self._thread_calls: set[Future[None]] = set()

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of remote storage that other processes use too."""
        bounded = self.options.capacity is not None
        return Capabilities(
            medium="remote", persistent=True, shared=True, bounded=bounded, lists=True, sizes=True, spares=bounded
        )

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
        """Connect, and remove leftovers of killed writers in the background. Read-only storage is no error.

        Cancelled, it first ends the step that has begun. ``close`` releases its result.
        """
        await self.run_blocking(self._open)
        if self.options.capacity is not None:
            self._bounded_store = self._make_bounded_store(self.options.capacity)
            await self.run_blocking(self._bounded_store.open)
            self._reservations = ReservationManager(self._bounded_store, self.run_blocking, self._log)
        self._leftovers_removal = asyncio.get_running_loop().create_task(self._remove_leftovers())

    async def close(self) -> None:
        """See :meth:`Backend.close`. Retries end at once. Cancelled, it stops waiting."""
        self._retrier.stop()
        while self._thread_calls:
            await asyncio.wait([asyncio.wrap_future(call) for call in self._thread_calls.copy()])
        if self._reservations is not None:
            reservations, self._reservations = self._reservations, None
            await reservations.close()
        if self._bounded_store is not None:
            bounded_store, self._bounded_store = self._bounded_store, None
            await self.run_blocking(bounded_store.close)
        await super().close()
        if self._leftovers_removal is not None:
            await asyncio.wait([self._leftovers_removal])
        if self._medium is not None:
            medium, self._medium = self._medium, None
            await self.run_blocking(medium.close)

    async def contains(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        """See :meth:`Backend.contains`. Asks the medium only for keys without a cached answer."""
        cached = self._lookup_cache.presence(keys, self.options.lookup_cache_seconds)
        answers = dict(zip(keys, cached, strict=True))
        sizes = await self._query_sizes([key for key, present in answers.items() if present is None])
        answers.update((key, size is not None) for key, size in sizes.items())
        if self._reservations is not None:
            hidden = self._reservations.bounded_store.hidden(keys)
            return [bool(answers[key]) and not is_hidden for key, is_hidden in zip(keys, hidden, strict=True)]
        return [bool(answers[key]) for key in keys]

    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        """Return the presence and size of each object. With a capacity, pin the objects.

        Asks the medium for sizes that are not cached. Cancelled, nothing stays pinned.
        """
        if self._reservations is not None:
            return await self._reservations.prepare_load(keys, self._sizes)
        sizes = await self._sizes(keys)
        return LoadReservation([size is not None for size in sizes], nbytes=sizes)

    async def prepare_store(
        self, keys: Sequence[ObjectKey], nbytes: Sequence[int], spare: Sequence[bool] = ()
    ) -> StoreReservation:
        """Reserve bytes if there is a capacity. Cancelled, they are released.

        A spare object gets free capacity below ``low_watermark`` only.
        """
        if self._reservations is not None:
            return await self._reservations.prepare_store(keys, nbytes, spare)
        return await super().prepare_store(keys, nbytes, spare)

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        """See :meth:`Backend.load_into`. Cancelled, it waits for the reads that have begun."""
        return await self._load_each(keys, buffers)

    async def load_and_check(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], checks: Sequence[LoadCheck]
    ) -> Sequence[LoadOutcome]:
        """See :meth:`Backend.load_and_check`. Cancelled, it waits for the reads that have begun."""
        if self._reservations is None:
            return await self._load_each(keys, buffers, checks)
        return await self._reservations.load(self._load_each, keys, buffers, checks)

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        """See :meth:`Backend.store`. Cancelled, it waits for the writes that have begun."""
        if self._reservations is not None:
            return await self._reservations.store(keys, buffers, self._for_each_object)
        return await self._for_each_object(self._store, keys, buffers)

    async def store_and_seal(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], seals: Sequence[StoreSeal]
    ) -> Sequence[StoreOutcome]:
        """See :meth:`Backend.store_and_seal`. Cancelled, it waits for the writes that have begun."""
        if self._reservations is not None:
            return await self._reservations.store(keys, buffers, self._for_each_object, seals)
        return await self._for_each_object(self._store, keys, buffers, seals)

    async def touch(self, keys: Sequence[ObjectKey], spare: Sequence[bool]) -> None:
        """See :meth:`Backend.touch`. The usage log tells other hosts, at the latest half a minute later."""
        if self._reservations is not None:
            self._reservations.bounded_store.touch(keys, spare)

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        """See :meth:`Backend.delete`. Cancelled, it waits for the requests that have begun."""
        for start in range(0, len(keys), _DELETE_BATCH):
            delete = self._delete if self._reservations is None else self._reservations.bounded_store.delete
            await self.run_blocking(delete, keys[start : start + _DELETE_BATCH])
        self._unreadable.forget(keys)

    async def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        """See :meth:`Backend.list_objects`. Each folder of objects is one batch. Cancellation has no effect."""
        folders = [""]
        for pattern in layout.FOLDERS:
            above, folders = folders, []
            for folder in above:
                found = await self._entries(folder)
                names = (entry.name for entry in found if entry.is_folder and pattern.fullmatch(entry.name))
                folders += [f"{folder}/{name}".lstrip("/") for name in names]
        for folder in folders:
            asked = time.monotonic()
            objects = layout.objects_in(folder, await self._entries(folder))
            self._lookup_cache.add_listed(objects, asked)
            yield objects

    async def _entries(self, folder: str) -> Any:
        return await self.run_blocking(self._retrier.call, self.medium.entries, folder)

    async def _remove_leftovers(self) -> None:
        """Remove leftovers of killed writers. A failure is only logged."""
        try:
            count = await self.run_blocking(self.medium.remove_leftovers, lambda: self._retrier.stopped)
        except Exception as error:
            self._log.info(
                "cannot look for leftovers of killed writers at %s: %s",
                self.options.url,
                error,
            )
        else:
            if count:
                self._log.info("removed %d leftovers of killed writers", count)

    async def _sizes(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Return the sizes of objects, ``None`` for an absent one. Cancelled, it waits for requests that have begun."""
        sizes = dict(zip(keys, self._lookup_cache.sizes(keys, self.options.lookup_cache_seconds), strict=True))
        sizes.update(await self._query_sizes([key for key, size in sizes.items() if size is None]))
        return [sizes[key] for key in keys]

    async def _query_sizes(self, keys: Sequence[ObjectKey]) -> dict[ObjectKey, int | None]:
        """Ask the medium for the sizes of objects, in batches. Cancelled, it waits for requests that have begun."""
        size = self.medium.lookup_batch
        batches = [keys[start : start + size] for start in range(0, len(keys), size)]
        answers = await self._gather_to_the_end(self.run_lookup(self._query_batch, batch) for batch in batches)
        return {
            key: answer
            for batch, found in zip(batches, answers, strict=True)
            for key, answer in zip(batch, found, strict=True)
        }

    async def _load_each(self, *objects: Sequence[Any]) -> list[LoadOutcome]:
        results = await self._on_all_threads(self.run_load, self.context.load_executor, self._load, objects)
        return self._unreadable.outcomes(objects[0], results)

    async def _for_each_object(self, work: Callable[..., T], *objects: Sequence[Any]) -> list[T]:
        return await self._on_all_threads(self.run_blocking, self.context.executor, work, objects)

    async def _on_all_threads(
        self,
        run: Callable[[Callable[[], None]], Awaitable[None]],
        executor: Executor,
        work: Callable[..., T],
        objects: Sequence[Sequence[Any]],
    ) -> list[T]:
        """Run ``work`` on every object, on all threads of an executor. Raise the first error after the last call.

        Each thread takes one object after the other. Cancelled, this waits for all of them.

        Args:
            run: runs a function on one thread of the executor.
        """
        arguments = list(zip(*objects, strict=True))
        threads = min(len(arguments), self.context.threads)
        batch = ObjectBatch(work, arguments)
        if threads == 1:
            await run(batch.work_on_waiting)
        elif threads:
            await self.run_to_the_end(batch.start(executor, threads, self._thread_calls))
        return batch.results()

    async def _gather_to_the_end(self, calls: Iterable[Awaitable[T]]) -> list[T]:
        """Await all calls to their real end, cancelled or not (C7). Raise the first error."""
        done = await self.run_to_the_end(asyncio.gather(*calls, return_exceptions=True))
        results: list[T] = []
        for result in done:
            if isinstance(result, BaseException):
                raise result
            results.append(result)
        return results

    # The methods below run on the tier's threads.

    def _open(self) -> None:
        self._medium = make_medium(self.options)
        self._retrier.call(self._medium.open)

    def _make_bounded_store(self, capacity_bytes: int) -> BoundedStore:
        options = self.options
        medium = MediumAdapter(self.medium, self._retrier, self._lookup_cache, options.lookup_cache_seconds)
        account = AccountOptions(
            capacity_bytes=capacity_bytes,
            low_watermark=options.low_watermark,
            high_watermark=options.high_watermark,
            grace_seconds=options.eviction_grace,
            lease_seconds=options.lease_seconds,
        )
        return BoundedStore(medium, medium, account, self._log, stopped=lambda: self._retrier.stopped)

    def _query_batch(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        asked = time.monotonic()
        sizes = self._retrier.call(self.medium.sizes, list(map(layout.name_of, keys)))
        for key, size in zip(keys, sizes, strict=True):
            self._lookup_cache.add_answer(key, size is not None, asked, size)
        return sizes

    def _load(
        self, key: ObjectKey, buffer: memoryview, check: LoadCheck | None = None
    ) -> LoadOutcome | UnreadableObjectError:
        asked = time.monotonic()
        checks = iter([check])

        def load() -> LoadOutcome:
            return self.medium.load(layout.name_of(key), buffer, next(checks, None))  # a retry begins again

        retrier = _ONE_TRY if key in self._unreadable else self._retrier
        try:
            outcome = retrier.call(load)
        except UnreadableObjectError as error:
            return error
        self._lookup_cache.add_answer(
            key, outcome is not LoadOutcome.MISS, asked, len(buffer) if outcome is LoadOutcome.HIT else None
        )
        return outcome

    def _store(self, key: ObjectKey, buffer: memoryview, seal: StoreSeal | None = None) -> StoreOutcome:
        began = time.monotonic()
        present: bool | None = None
        try:
            self._retrier.call(self.medium.store, layout.name_of(key), buffer, seal)
            present = True
        except OSError as error:
            if not self._rejections.covers(error):
                raise
            return StoreOutcome.REJECTED
        finally:
            self._lookup_cache.add_change(key, present, began, len(buffer) if present else None)
        self._rejections.store_succeeded()
        return StoreOutcome.STORED

    def _delete(self, keys: Sequence[ObjectKey]) -> None:
        began = time.monotonic()
        present: bool | None = None
        try:
            self._retrier.call(self.medium.delete, list(map(layout.name_of, keys)))
            present = False
        finally:
            for key in keys:
                self._lookup_cache.add_change(key, present, began)


def make_medium(options: NfsOptions) -> Medium:
    """Return the medium for a URL, not yet open. May import packages and read fsspec's configuration."""
    if options.kind == "share":
        return PosixShare(options.folder)
    given = dict(options.storage_options)
    if options.kind == "s3":
        fs, root = _file_system(options.url, s3_options(given, options.retry_seconds))
        return S3Store(fs, root, options.part_size)
    fs, root = _file_system(options.url, given)
    return RenamingStore(fs, root) if options.kind == "renaming" else ObjectStore(fs, root)


def _file_system(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    """Return an fsspec file system without caches that no other code uses, and the root in its notation."""
    fs, root = fsspec.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **options)
    return fs, str(root)
