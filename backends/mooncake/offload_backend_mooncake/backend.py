"""The ``mooncake`` backend: the contract's coroutines, each one call on the tier's threads."""

from __future__ import annotations

from collections.abc import Sequence

from offload_backend_mooncake import connections
from offload_backend_mooncake.client import Client, Cluster
from offload_backend_mooncake.library import Deadlines
from offload_backend_mooncake.objects import Objects
from offload_backend_mooncake.options import MooncakeOptions
from offload_core.api import (
    Backend,
    BackendContext,
    Capabilities,
    LoadCheck,
    LoadOutcome,
    LoadReservation,
    ObjectKey,
    StoreOutcome,
    StoreReservation,
    StoreSeal,
)


class MooncakeBackend(Backend[MooncakeOptions]):
    """Objects in the memory of a Mooncake Store cluster, which evicts by itself.

    A lookup protects the objects that it finds from eviction for the master's ``--default_kv_lease_ttl``.
    """

    capabilities = Capabilities(medium="remote", persistent=True, shared=True, sizes=True, evicts=True)

    def __init__(self, options: MooncakeOptions, context: BackendContext) -> None:
        super().__init__(options, context)
        self._client: Client | None = None
        self._objects: Objects | None = None

    async def open(self) -> None:
        """Connect to the master, or share the connection of another tier of this process."""
        await self.run_blocking(self._open)

    async def close(self) -> None:
        """Wait for running calls, and give the connection back."""
        await super().close()
        client, self._client, self._objects = self._client, None, None
        if client is not None:
            connections.release(client)

    async def contains(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        """See :meth:`Backend.contains`."""
        return await self.run_lookup(self._opened.contains, self._names(keys))

    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        """Return the presence and size of each object. The lookup itself protects the objects for a while."""
        found = await self.run_lookup(self._opened.sizes, self._names(keys))
        return LoadReservation([is_there for is_there, _ in found], nbytes=[nbytes for _, nbytes in found])

    async def prepare_store(
        self, keys: Sequence[ObjectKey], nbytes: Sequence[int], spare: Sequence[bool] = ()
    ) -> StoreReservation:
        """Grant every store, without a question. The store itself asks which objects are present."""
        return StoreReservation([None] * len(keys))

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        """See :meth:`Backend.load_into`. Cancelled, it waits for the transfers."""
        return await self.run_load(self._opened.load, self._names(keys), buffers)

    async def load_and_check(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], checks: Sequence[LoadCheck]
    ) -> Sequence[LoadOutcome]:
        """See :meth:`Backend.load_and_check`. It asks the master no question before the transfer."""
        return await self.run_load(self._opened.load, self._names(keys), buffers, checks)

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        """See :meth:`Backend.store`. Cancelled, it waits for the transfers."""
        return await self.run_blocking(self._opened.store, self._names(keys), buffers)

    async def store_and_seal(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], seals: Sequence[StoreSeal]
    ) -> Sequence[StoreOutcome]:
        """See :meth:`Backend.store_and_seal`. The objects of a transfer are sealed right before it."""
        return await self.run_blocking(self._opened.store, self._names(keys), buffers, seals)

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        """See :meth:`Backend.delete`."""
        await self.run_blocking(self._opened.delete, self._names(keys))

    @property
    def _opened(self) -> Objects:
        if self._objects is None:
            raise OSError(f"tier {self.context.name!r} is not open")
        return self._objects

    def _names(self, keys: Sequence[ObjectKey]) -> list[str]:
        return [f"{self.options.prefix}/{key.path}" for key in keys]

    def _open(self) -> None:
        options = self.options
        cluster = Cluster(
            master=options.master,
            metadata=options.metadata,
            host=options.host,
            protocol=options.protocol,
            device=options.device,
            deadlines=Deadlines(
                options.request_timeout_seconds, options.connect_timeout_seconds, options.transfer_timeout_seconds
            ),
            insecure=options.insecure,
        )
        self._client = connections.acquire(cluster, self.context.name)
        self._objects = Objects(self._client, options.replicas, options.soft_pin, options.full_wait_seconds)
