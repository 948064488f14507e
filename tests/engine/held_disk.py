"""A disk backend whose loads, after the first few calls, are held, or fail."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from offload_backend_disk import DiskBackend, DiskOptions
from pydantic import Field

from offload_core.api.backend import BackendContext, BackendType, LoadReservation, StoreOutcome
from offload_core.api.hooks import hookimpl
from offload_core.api.keys import ObjectKey

OFFLOAD_API_VERSION = 1


class HeldOptions(DiskOptions):
    """A folder, and what becomes of loads. Those that are not answered and not held fail."""

    answered_calls: int = Field(default=0, description="so many loads, of a batch each, are as they should be")
    held_seconds: float | None = Field(default=None, description="the others are held so long")
    held_until_stored: int | None = Field(
        default=None,
        description="the others are held until so many times as many objects have been stored as before the first load",
    )


class HeldDisk(DiskBackend):
    """Does what a disk does, but for the loads that its options hold or fail."""

    options: HeldOptions

    def __init__(self, options: HeldOptions, context: BackendContext) -> None:
        super().__init__(options, context)
        self._calls = self._stored = self._stored_before = 0
        self._enough = asyncio.Event()

    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        """Called in the order of the batches, which is why it is this call that is held."""
        self._calls += 1
        if self._calls == 1:
            self._stored_before = self._stored
        if self._calls > self.options.answered_calls:
            await self._hold()
        return await super().prepare_load(keys)

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        outcomes = await super().store(keys, buffers)
        self._stored += len(keys)
        times = self.options.held_until_stored
        if times is not None and self._calls and self._stored >= (1 + times) * self._stored_before:
            self._enough.set()
        return outcomes

    async def _hold(self) -> None:
        if self.options.held_seconds is not None:
            await asyncio.sleep(self.options.held_seconds)
        elif self.options.held_until_stored is not None:
            await self._enough.wait()
        else:
            raise OSError("this load fails")


@hookimpl
def offload_register_backends() -> list[BackendType]:
    return [BackendType("held-disk", HeldDisk, HeldOptions)]
