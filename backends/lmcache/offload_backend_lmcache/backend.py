"""The ``lmcache`` backend: the contract's coroutines, each a few requests on the tier's threads.

A batch is spread over several connections, so that both sides copy on several cores. On each connection the objects
follow each other without a pause.
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

from offload_backend_lmcache.client.connection import Connection, Target
from offload_backend_lmcache.client.first_read import FirstRead
from offload_backend_lmcache.client.pool import ConnectionPool
from offload_backend_lmcache.options import LMCacheOptions
from offload_backend_lmcache.wire.frames import MAX_ENTRIES, Found, Status
from offload_core.api import (
    Backend,
    BackendContext,
    Capabilities,
    LoadCheck,
    LoadOutcome,
    LoadReservation,
    ObjectKey,
    StoreOutcome,
    StoreSeal,
)

T = TypeVar("T")

_LANE_BYTES = 1024**2
"""A further connection is used for each of these many bytes of a batch."""
_BATCH_OBJECTS = 64
"""Loads and stores of more objects become several requests."""

_LOADED = {Status.HIT: LoadOutcome.HIT, Status.ABSENT: LoadOutcome.MISS, Status.DAMAGED: LoadOutcome.CORRUPT}
_STORED = {
    Status.STORED: StoreOutcome.STORED,
    Status.PRESENT: StoreOutcome.ALREADY_PRESENT,
    Status.FULL: StoreOutcome.REJECTED,
}


class LMCacheBackend(Backend[LMCacheOptions]):
    """Objects in an LMCache server that loads offload-core's module. LMCache evicts them as it likes."""

    capabilities = Capabilities(medium="remote", persistent=True, shared=True, sizes=True, evicts=True)

    def __init__(self, options: LMCacheOptions, context: BackendContext) -> None:
        super().__init__(options, context)
        self._pool: ConnectionPool | None = None
        self._busy_lanes: Counter[Executor] = Counter()
        """The parts of all batches that use a thread or wait for one."""

    async def open(self) -> None:
        """Connect once. The error tells a dead server from an LMCache server without the module."""
        busy = max(self.options.connections, self.context.threads)
        pool = ConnectionPool(self.target(), max_idle=2 * busy + 1)  # of loads, of stores, and of a lookup
        await self.run_blocking(pool.call, lambda connection: None)
        self._pool = pool

    async def close(self) -> None:
        """See :meth:`Backend.close`."""
        await super().close()
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.close()

    async def contains(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        """See :meth:`Backend.contains`. Always asks the server."""
        return [found.present for found in await self._find(keys)]

    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        """Return presence and sizes. Nothing is pinned: LMCache may evict an object before the load."""
        found = await self._find(keys)
        return LoadReservation([one.present for one in found], nbytes=[one.nbytes for one in found])

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        """See :meth:`Backend.load_into`. Cancelled, it waits for the requests that have begun."""
        return await self._spread_load(keys, buffers)

    async def load_and_check(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], checks: Sequence[LoadCheck]
    ) -> Sequence[LoadOutcome]:
        """See :meth:`Backend.load_and_check`. It asks the server for nothing but the objects."""
        return await self._spread_load(keys, buffers, [FirstRead(check) for check in checks])

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        """See :meth:`Backend.store`. ``REJECTED``: LMCache has no memory left and did not evict fast enough."""
        return await self._spread(self.run_blocking, self.context.executor, self._store, keys, buffers)

    async def store_and_seal(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], seals: Sequence[StoreSeal]
    ) -> Sequence[StoreOutcome]:
        """See :meth:`Backend.store_and_seal`. Each part is read right after it was sent."""
        return await self._spread(self.run_blocking, self.context.executor, self._store, keys, buffers, seals)

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        """See :meth:`Backend.delete`. Cancelled, it waits for the request that has begun."""
        for start in range(0, len(keys), MAX_ENTRIES):
            await self._call(self.run_blocking, self._delete, keys[start : start + MAX_ENTRIES])

    def target(self) -> Target:
        """Return the server with its timeouts: no longer than the core waits for the calls that they limit."""
        options, context = self.options, self.context
        return Target(
            address=options.server,
            connect_seconds=min(options.connect_timeout_seconds, context.open_timeout_seconds),
            io_seconds=min(
                options.io_timeout_seconds, max(context.load_timeout_seconds, context.store_timeout_seconds)
            ),
            token=b"" if options.token is None else options.token.get_secret_value().encode(),
            token_variable=f"OFFLOAD_CORE_{re.sub('[^A-Z0-9]', '_', self.context.name.upper())}_TOKEN",
            insecure=options.insecure,
        )

    def _name(self, key: ObjectKey) -> bytes:
        return f"{self.options.prefix}{key.path}".encode()

    def _names(self, keys: Sequence[ObjectKey]) -> list[bytes]:
        return [self._name(key) for key in keys]

    async def _call(self, run: Callable[..., Awaitable[T]], work: Callable[..., T], *arguments: object) -> T:
        """Run ``work(connection, *arguments)`` on a thread, with the method ``run``."""
        if self._pool is None:
            raise OSError(errno.ENOTCONN, f"tier {self.context.name!r} is not open")
        return await run(self._pool.call, lambda connection: work(connection, *arguments))

    async def _find(self, keys: Sequence[ObjectKey]) -> list[Found]:
        names = self._names(keys)
        batches = [names[start : start + MAX_ENTRIES] for start in range(0, len(names), MAX_ENTRIES)]
        found: list[list[Found]] = [await self._call(self.run_lookup, Connection.find, batch) for batch in batches]
        return [one for batch in found for one in batch]

    async def _spread_load(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], *checks: Sequence[FirstRead]
    ) -> list[LoadOutcome]:
        return await self._spread(self.run_load, self.context.load_executor, self._load, keys, buffers, *checks)

    async def _spread(
        self,
        run: Callable[..., Awaitable[list[T]]],
        executor: Executor,
        work: Callable[..., list[T]],
        keys: Sequence[ObjectKey],
        buffers: Sequence[memoryview],
        *more: Sequence[FirstRead | StoreSeal],
    ) -> list[T]:
        """Run ``work`` on parts of a batch, each on a connection of its own. The outcomes are in the batch's order.

        While other batches use the threads, a batch stays whole: more parts would only wait, and cost more requests.

        Args:
            run: runs a function on a thread of ``executor``.
            work: gets the connection and its part of each of the other arguments, which have one value per object.
        """
        if not keys:
            return []
        wanted = sum(map(len, buffers)) // _LANE_BYTES
        free = self.context.threads - self._busy_lanes[executor]
        useful = min(wanted, self.options.connections, free, len(keys))
        lanes = max(1, useful, -(-len(keys) // _BATCH_OBJECTS))
        self._busy_lanes[executor] += lanes
        try:
            done = await self._gather_to_the_end(
                self._call(run, work, *(values[lane::lanes] for values in (keys, buffers, *more)))
                for lane in range(lanes)
            )
        finally:
            self._busy_lanes[executor] -= lanes
        outcomes: list[T | None] = [None] * len(keys)
        for lane, part in enumerate(done):
            outcomes[lane::lanes] = part
        return [outcome for outcome in outcomes if outcome is not None]

    async def _gather_to_the_end(self, calls: Iterable[Awaitable[T]]) -> list[T]:
        """Await all calls to their real end, cancelled or not (C7). Raise the first error."""
        done = await self.run_to_the_end(asyncio.gather(*calls, return_exceptions=True))
        results: list[T] = []
        for result in done:
            if isinstance(result, BaseException):
                raise result
            results.append(result)
        return results

    def _load(
        self,
        connection: Connection,
        keys: Sequence[ObjectKey],
        buffers: Sequence[memoryview],
        *checks: Sequence[FirstRead],
    ) -> list[LoadOutcome]:
        statuses = _within_limit(connection, connection.load, Status.ABSENT, self._names(keys), buffers, *checks)
        return [_LOADED[status] for status in statuses]

    def _store(
        self,
        connection: Connection,
        keys: Sequence[ObjectKey],
        buffers: Sequence[memoryview],
        *seals: Sequence[StoreSeal],
    ) -> list[StoreOutcome]:
        statuses = _within_limit(connection, connection.store, Status.FULL, self._names(keys), buffers, *seals)
        if Status.DAMAGED in statuses:
            raise OSError(errno.EIO, f"an object was damaged on its way to {self.options.address}; it was not stored")
        return [_STORED[status] for status in statuses]

    def _delete(self, connection: Connection, keys: Sequence[ObjectKey]) -> None:
        busy = connection.delete(self._names(keys)).count(Status.BUSY)
        if busy:
            raise OSError(
                errno.EBUSY,
                f"{busy} of {len(keys)} objects at {self.options.address} were not deleted, because LMCache is still "
                "reading or writing them; is its L2 alive?",
            )


def _within_limit(
    connection: Connection,
    work: Callable[..., list[Status]],
    too_large: Status,
    names: Sequence[bytes],
    buffers: Sequence[memoryview],
    *more: Sequence[FirstRead | StoreSeal],
) -> list[Status]:
    """Run ``work`` on the objects that are not too large for the server. The others get the status ``too_large``."""
    statuses = [too_large] * len(names)
    small = [index for index, buffer in enumerate(buffers) if len(buffer) <= connection.max_object_bytes]
    if small:
        done = work(*([values[index] for index in small] for values in (names, buffers, *more)))
        for index, status in zip(small, done, strict=True):
            statuses[index] = status
    return statuses
