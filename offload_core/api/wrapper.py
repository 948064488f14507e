"""A backend around another one, for plugins that add something to every backend, and for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from offload_core.api.backend import (
    Backend,
    Capabilities,
    LoadOutcome,
    LoadReservation,
    StoredObject,
    StoreOutcome,
    StoreReservation,
)
from offload_core.api.keys import ObjectKey
from offload_core.api.options import BackendOptions


class BackendWrapper(Backend[BackendOptions]):
    """Hands every call on to ``inner``. Override what should be different; the contract stays the same.

    A wrapper that changes objects' bytes must change them back on load; one that changes their size must say the
    reserved size in ``prepare_store`` and the original one in ``list_objects`` and in ``prepare_load``.
    """

    def __init__(self, inner: Backend[Any]) -> None:
        super().__init__(inner.options, inner.context)
        self.inner = inner

    @property
    def capabilities(self) -> Capabilities:
        """Those of the backend inside."""
        return self.inner.capabilities

    async def open(self) -> None:
        """See :meth:`Backend.open`."""
        await self.inner.open()

    async def close(self) -> None:
        """See :meth:`Backend.close`; waits for what the wrapper itself runs, then closes the backend inside."""
        await super().close()
        await self.inner.close()

    async def contains(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        """See :meth:`Backend.contains`."""
        return await self.inner.contains(keys)

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        """See :meth:`Backend.load_into`."""
        return await self.inner.load_into(keys, buffers)

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        """See :meth:`Backend.store`."""
        return await self.inner.store(keys, buffers)

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        """See :meth:`Backend.delete`."""
        await self.inner.delete(keys)

    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        """See :meth:`Backend.prepare_load`."""
        return await self.inner.prepare_load(keys)

    async def prepare_store(self, keys: Sequence[ObjectKey], nbytes: Sequence[int]) -> StoreReservation:
        """See :meth:`Backend.prepare_store`."""
        return await self.inner.prepare_store(keys, nbytes)

    def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        """See :meth:`Backend.list_objects`."""
        return self.inner.list_objects()
