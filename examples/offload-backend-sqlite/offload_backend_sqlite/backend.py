"""The ``sqlite`` backend: the contract's coroutines around the blocking calls of :mod:`.database`.

A cancelled coroutine runs to its end before it raises the cancellation (C7). If it was reserving, it releases the
reservation at once, because its caller never got it (C10).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from offload_backend_sqlite.database import Database
from offload_backend_sqlite.options import SqliteOptions
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
    to_the_end,
)

P = ParamSpec("P")
T = TypeVar("T")


class SqliteBackend(Backend[SqliteOptions]):
    """All objects in one SQLite file, which several processes of one host may use at once."""

    capabilities = Capabilities(medium="disk", persistent=True, shared=True, bounded=True, lists=True, sizes=True)

    def __init__(self, options: SqliteOptions, context: BackendContext) -> None:
        super().__init__(options, context)
        self._database = Database(options.path, options.capacity, options.busy_timeout_seconds)
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def open(self) -> None:
        """Create the file if it is missing, and check its format."""
        await self._run(self._database.open)

    async def close(self) -> None:
        """Wait for running operations, then release all reservations and close every connection (C13)."""
        self._closed = True
        while self._running:
            await asyncio.wait(self._running)
        await self.run_blocking(self._database.close)

    async def contains(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        """See :meth:`Backend.contains`."""
        return await self._run(self._database.contains, keys)

    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        """Pin the objects that are present: no process evicts them (C9)."""
        sizes, release = await self._reserve(self._database.pin, keys)
        return LoadReservation([size is not None for size in sizes], release, sizes)

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        """See :meth:`Backend.load_into`."""
        return await self._run(self._database.load, keys, buffers)

    async def prepare_store(
        self, keys: Sequence[ObjectKey], nbytes: Sequence[int], spare: Sequence[bool] = ()
    ) -> StoreReservation:
        """Reserve capacity; the least recently used objects are evicted for it (C11). Objects present are pinned."""
        (outcomes, evicted), release = await self._reserve(self._database.reserve, keys, nbytes)
        return StoreReservation(outcomes, evicted, release)

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        """See :meth:`Backend.store`. An object without a reservation is stored if it fits, else rejected."""
        return await self._run(self._database.store, keys, buffers)

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        """See :meth:`Backend.delete`."""
        await self._run(self._database.delete, keys)

    async def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        """See :meth:`Backend.list_objects`; in the order of the keys."""
        after = ""
        while batch := await self._run(self._database.objects_after, after):
            yield batch
            after = batch[-1].key.path

    async def _run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` on a thread of the tier; :meth:`close` waits for its end."""
        if self._closed:
            raise OSError(f"tier {self.context.name!r} is closed")
        running = asyncio.create_task(self.run_blocking(function, *args, **kwargs))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return await to_the_end(running)

    async def _reserve(
        self, function: Callable[Concatenate[str, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[T, Callable[[], Awaitable[None]]]:
        """Run ``function`` with a new reservation; return its result, and the reservation's release."""
        reservation = secrets.token_hex(8)
        release = partial(self._release, reservation)
        try:
            return await self._run(function, reservation, *args, **kwargs), release
        except asyncio.CancelledError:
            await release()
            raise

    async def _release(self, reservation: str) -> None:
        if not self._closed:  # close() has released everything
            await self._run(self._database.release, reservation)
