"""A backend around another backend, for plugins that add a feature to every backend, and for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from offload_core.api.backend import Backend, LoadOutcome, LoadReservation, StoredObject, StoreOutcome, StoreReservation
from offload_core.api.capabilities import Capabilities
from offload_core.api.checks.overrides import is_overridden
from offload_core.api.keys import ObjectKey
from offload_core.api.memory.shared_memory import SharedMemory
from offload_core.api.one_pass import LoadCheck, StoreSeal
from offload_core.api.options import BackendOptions


class BackendWrapper(Backend[BackendOptions]):
    """A backend that passes every call on to ``inner``. Override the methods that should differ.

    A subclass must keep the contract of :class:`Backend`. If it changes the objects' bytes, it must restore them on
    load. If it changes their size, it must pass the changed size to the inner ``prepare_store``. It must return the
    original size from ``list_objects`` and ``prepare_load``.

    A cancellation reaches the call of ``inner``, which handles it.

    Args:
        inner: the wrapped backend; the wrapper shares its options and context.
    """

    def __init__(self, inner: Backend[Any]) -> None:
        super().__init__(inner.options, inner.context)
        self.inner = inner

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the inner backend."""
        return self.inner.capabilities

    async def open(self) -> None:
        """See :meth:`Backend.open`."""
        await self.inner.open()

    async def close(self) -> None:
        """Wait for the wrapper's own work, then close the inner backend. See :meth:`Backend.close`."""
        await super().close()
        await self.inner.close()

    async def contains(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        """See :meth:`Backend.contains`."""
        return await self.inner.contains(keys)

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        """See :meth:`Backend.load_into`."""
        return await self.inner.load_into(keys, buffers)

    async def load_and_check(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], checks: Sequence[LoadCheck]
    ) -> Sequence[LoadOutcome]:
        """See :meth:`Backend.load_and_check`."""
        return await self.inner.load_and_check(keys, buffers, checks)

    @property
    def loads_in_one_call(self) -> bool:
        """See :meth:`Backend.loads_in_one_call`. A wrapper that overrides ``load_into`` sees every load."""
        return super().loads_in_one_call and self.inner.loads_in_one_call

    @property
    def lends(self) -> bool:
        """See :attr:`Backend.lends`. A wrapper that overrides ``load_into`` or ``store`` sees every load and store."""
        return self.inner.lends and not any(
            is_overridden(self, BackendWrapper, name) for name in ("load_into", "store")
        )

    @property
    def lent_memory(self) -> SharedMemory | None:
        """See :attr:`Backend.lent_memory`."""
        return self.inner.lent_memory

    @property
    def pins_lent_memory(self) -> bool:
        """See :attr:`Backend.pins_lent_memory`."""
        return self.inner.pins_lent_memory

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        """See :meth:`Backend.store`."""
        return await self.inner.store(keys, buffers)

    async def store_and_seal(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], seals: Sequence[StoreSeal]
    ) -> Sequence[StoreOutcome]:
        """See :meth:`Backend.store_and_seal`."""
        return await self.inner.store_and_seal(keys, buffers, seals)

    @property
    def seals_stores(self) -> bool:
        """See :attr:`Backend.seals_stores`. A wrapper that overrides ``store`` sees every store."""
        return super().seals_stores and self.inner.seals_stores

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        """See :meth:`Backend.delete`."""
        await self.inner.delete(keys)

    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        """See :meth:`Backend.prepare_load`."""
        return await self.inner.prepare_load(keys)

    async def prepare_store(
        self, keys: Sequence[ObjectKey], nbytes: Sequence[int], spare: Sequence[bool] = ()
    ) -> StoreReservation:
        """See :meth:`Backend.prepare_store`. Without flags, ``inner`` is called without them too."""
        if not spare:
            return await self.inner.prepare_store(keys, nbytes)
        return await self.inner.prepare_store(keys, nbytes, spare)

    async def touch(self, keys: Sequence[ObjectKey], spare: Sequence[bool]) -> None:
        """See :meth:`Backend.touch`."""
        await self.inner.touch(keys, spare)

    def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        """See :meth:`Backend.list_objects`."""
        return self.inner.list_objects()
