"""A plugin for the tests: the disk backend, with faults and gates that its options describe."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import ClassVar

from offload_backend_disk import DiskBackend, DiskOptions
from pydantic import Field

from offload_core.api.backend import (
    BackendContext,
    BackendType,
    LoadOutcome,
    StoredObject,
    StoreOutcome,
    StoreReservation,
)
from offload_core.api.capabilities import Capabilities
from offload_core.api.hooks import hookimpl
from offload_core.api.keys import ObjectKey
from offload_core.api.options import BackendOptions

OFFLOAD_API_VERSION = 1


class OddOptions(DiskOptions):
    lists: bool = Field(True, description="declare that it lists")
    per_process: bool = Field(False, description="declare a medium of one process")
    gate: Path | None = Field(None, description="a FIFO at which calls of `gated` wait until it was written and closed")
    gated: str = Field("", description="operation that waits at the gate")
    blocks: bool = Field(False, description="wait at the gate on the event loop, against C8")
    fails: str = Field("", description="operation that raises an I/O error")
    exits: str = Field("", description="operation that raises SystemExit")
    unreadable: str = Field("", description="hash of an object that fails every batch in which it is loaded")
    lies: str = Field("", description="operation whose answer is wrong")


class ForeignOptions(BackendOptions):
    """Options with the names of the bundled backends' and other meanings."""

    path: Path
    capacity: str
    eviction: str
    low_watermark: str
    high_watermark: float = 7.0


class OddBackend(DiskBackend):
    options: OddOptions
    loading_bytes: ClassVar = 0
    peak_loading_bytes: ClassVar = 0

    def __init__(self, options: OddOptions, context: BackendContext) -> None:
        super().__init__(options, context)
        self._loads: Counter[ObjectKey] = Counter()
        self._rejections_of_scan = 3
        if options.fails == "construct":
            raise RuntimeError("no device")

    @property
    def capabilities(self) -> Capabilities:
        mine = not self.options.per_process
        return Capabilities(medium="disk", persistent=mine, shared=mine, lists=self.options.lists)

    async def open(self) -> None:
        await self._step("open")
        await super().open()

    async def contains(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        await self._step("contains")
        return [True] * len(keys) if self.options.lies == "contains" else await super().contains(keys)

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        await self._step("load")
        if self.options.unreadable in [key.chunk_hash.hex() for key in keys]:
            raise OSError(errno.EIO, "a bad sector")
        if self.options.lies == "load":
            return [LoadOutcome.HIT] * len(keys)
        if self.options.lies == "corrupt":
            return [LoadOutcome.CORRUPT] * len(keys)
        if self.options.lies == "load type":
            return [True for _ in keys]  # type: ignore[misc]
        if self.options.lies == "load count":
            return []
        if self.options.lies == "vanish":
            await super().delete(keys)
        nbytes = sum(map(len, buffers))
        OddBackend.loading_bytes += nbytes
        OddBackend.peak_loading_bytes = max(OddBackend.peak_loading_bytes, OddBackend.loading_bytes)
        try:
            outcomes = await super().load_into(keys, buffers)
        finally:
            OddBackend.loading_bytes -= nbytes
        for key, buffer in zip(keys, buffers, strict=True):
            self._loads[key] += 1
            if self.options.lies == "other bytes at each load" or (
                self.options.lies == "other bytes at the first load" and self._loads[key] == 1
            ):
                buffer[-1] ^= self._loads[key]
        return outcomes

    async def prepare_store(
        self, keys: Sequence[ObjectKey], nbytes: Sequence[int], spare: Sequence[bool] = ()
    ) -> StoreReservation:
        if self.options.lies == "room":
            return StoreReservation([StoreOutcome.REJECTED] * len(keys))
        if self.options.lies == "scan":
            self._rejections_of_scan -= 1
            if self._rejections_of_scan >= 0:
                return StoreReservation([StoreOutcome.REJECTED] * len(keys))
            return await super().prepare_store(keys, nbytes, spare)
        evicted = []
        if self.options.lies == "keep one":
            evicted = [stored.key async for batch in super().list_objects() for stored in batch]
            await super().delete(evicted)
        return StoreReservation([None] * len(keys), evicted)

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        await self._step("store")
        stored = await super().store(keys, buffers)
        return None if self.options.lies == "store type" else stored  # type: ignore[return-value]

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        await self._step("delete")
        await super().delete(keys)

    async def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        await self._step("list")
        async for batch in super().list_objects():
            yield batch

    async def _step(self, operation: str) -> None:
        gate = self.options.gate
        if gate is not None and self.options.gated == operation:
            if self.options.blocks:
                gate.read_bytes()
            else:
                await self.run_blocking(gate.read_bytes)
        if self.options.exits == operation:
            raise SystemExit(3)
        if self.options.fails == operation:
            raise OSError(errno.EIO, f"the {operation} failed")


@hookimpl
def offload_register_backends() -> list[BackendType]:
    return [BackendType("odd", OddBackend, OddOptions), BackendType("foreign", OddBackend, ForeignOptions)]
