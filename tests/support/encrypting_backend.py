"""Backends whose objects are encrypted on the medium by a tier's own code, so that the contract can test it.

A tier seals, encrypts and names its objects before its backend sees them. Here that happens inside a backend. So the
contract's tests, which store bytes of their own, meet the whole path of an encrypting tier.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, cast

from offload_core.api import (
    Backend,
    BackendContext,
    BackendOptions,
    BackendType,
    BackendWrapper,
    LoadOutcome,
    LoadReservation,
    ObjectKey,
    StoredObject,
    StoreOutcome,
    StoreReservation,
)
from offload_core.config.encryption_keys import parse_keys
from offload_core.config.model import BackendConfig, TierConfig
from offload_core.io_process.serving.scratch import CallScratch, MappedPiece
from offload_core.memory.staging_pool import Lease
from offload_core.memory.staging_shares import TierShare
from offload_core.objects.format import HEADER_BYTES
from offload_core.tiers.compression import Damage, TierCodec
from offload_core.tiers.staged_object import StagedObject, StoredForm, seal_all

_OVERHEAD_BYTES = HEADER_BYTES + 1
"""Beside the header one byte, since no pack has an empty payload, and the contract stores empty objects."""
_KEYS = f"test:{os.urandom(32).hex()}"


class EncryptingBackend(BackendWrapper):
    """A backend around another one; its buffers are payloads, and the inner backend gets encrypted objects.

    Args:
        inner_type: the type of the inner backend.
    """

    def __init__(self, inner_type: BackendType, options: BackendOptions, context: BackendContext) -> None:
        super().__init__(inner_type.backend(options, context))
        common = BackendConfig.model_validate(
            {"name": context.name, "type": inner_type.name, "encryption": "aes-256-gcm"}
        )
        self._codec = TierCodec(TierConfig(common, inner_type, options, parse_keys(_KEYS)), context.label)
        self._names = self._codec.names
        self._running: set[asyncio.Future[None]] = set()

    async def close(self) -> None:
        while self._running:  # a call may be between two of its steps, which the base class does not see
            await asyncio.wait(self._running)
        await super().close()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        call = asyncio.get_running_loop().create_future()
        self._running.add(call)
        try:
            yield
        finally:
            self._running.discard(call)
            call.set_result(None)

    async def contains(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        return await self.inner.contains(self._names.of(keys))

    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        reservation = await self.inner.prepare_load(self._names.of(keys))
        sizes = [None if nbytes is None else max(0, nbytes - _OVERHEAD_BYTES) for nbytes in reservation.nbytes]
        return LoadReservation(reservation.present, reservation.release, sizes)

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        with self._counted():
            return await self._load(keys, buffers)

    async def _load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        staged = await self.run_blocking(_staged, keys, buffers)
        names, damage = self._names.of(keys), dict[ObjectKey, Damage]()
        targets = [
            self._codec.load_target(one, name, one.lease.nbytes, None, [], damage)
            for one, name in _pairs(staged, names)
        ]
        forms = [target for target in targets if isinstance(target, StoredForm)]
        loaded = await self.inner.load_into([form.name for form in forms], [form.view for form in forms])
        decoded = iter(await self._codec.decode(forms, loaded, self, damage))
        outcomes = [next(decoded) if isinstance(target, StoredForm) else target for target in targets]

        def hand_over() -> None:
            for one, buffer, outcome in zip(staged, buffers, outcomes, strict=True):
                if outcome is LoadOutcome.HIT:
                    buffer[:] = one.lease.view[_OVERHEAD_BYTES:]

        await self.run_blocking(hand_over)
        return outcomes

    async def prepare_store(
        self, keys: Sequence[ObjectKey], nbytes: Sequence[int], spare: Sequence[bool] = ()
    ) -> StoreReservation:
        sizes = [size + _OVERHEAD_BYTES for size in nbytes]
        reservation = await super().prepare_store(self._names.of(keys), sizes, spare)
        return StoreReservation(reservation.outcomes, self._names.keys_of(reservation.evicted), reservation.release)

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        with self._counted():
            return await self._store(keys, buffers)

    async def _store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        def seal() -> list[StagedObject]:
            staged = _staged(keys, buffers)
            for one, buffer in _pairs(staged, buffers):
                one.lease.view[_OVERHEAD_BYTES:] = buffer
            seal_all(staged)
            return staged

        staged = await self.run_blocking(seal)
        scratch = cast("TierShare", CallScratch([one.scratch.view for one in staged if one.scratch is not None]))
        forms = [form for form in await self._codec.encode(staged, self, scratch, []) if form is not None]
        return await self.inner.store([form.name for form in forms], [form.view.toreadonly() for form in forms])

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        await self.inner.delete(self._names.all_of(keys))

    async def touch(self, keys: Sequence[ObjectKey], spare: Sequence[bool]) -> None:
        await self.inner.touch(self._names.of(keys), spare)

    async def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        async for batch in self.inner.list_objects():
            keys = self._names.keys_of([found.key for found in batch])
            yield [
                StoredObject(key, found.nbytes - _OVERHEAD_BYTES, found.stored_at_seconds)
                for key, found in _pairs(keys, batch)
            ]


def encrypting(inner: BackendType) -> BackendType:
    """Return a type of backends that encrypt all objects and store them in backends of the type ``inner``."""

    class Encrypting(EncryptingBackend):
        def __init__(self, options: BackendOptions, context: BackendContext) -> None:
            super().__init__(inner, options, context)

    backend: type[Backend[Any]] = Encrypting
    return BackendType(inner.name, backend, inner.options)


def _staged(keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StagedObject]:
    """Return objects with new memory for the sealed and for the encrypted form of each buffer's payload."""
    sizes = [len(buffer) + _OVERHEAD_BYTES for buffer in buffers]
    memory = [[MappedPiece(memoryview(bytearray(size))) for _ in range(2)] for size in sizes]
    return [StagedObject(key, cast("Lease", one), cast("Lease", two)) for key, (one, two) in _pairs(keys, memory)]


def _pairs(first: Sequence[Any], second: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(first, second, strict=True))
