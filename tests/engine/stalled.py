"""A plugin under which the threads of a disk tier never come back, from when a file says so."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offload_core.api.backend import Backend, LoadOutcome, StoreOutcome
from offload_core.api.hooks import TierInfo, hookimpl
from offload_core.api.keys import ObjectKey
from offload_core.api.wrapper import BackendWrapper

OFFLOAD_API_VERSION = 1


def signal_file(folder: Path) -> Path:
    """The file from which on calls of the tier on ``folder`` hang."""
    return folder.with_name("hang")


def witness_file(folder: Path) -> Path:
    """The file that the first call that hangs makes."""
    return folder.with_name("hung")


class Stalled(BackendWrapper):
    async def contains(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        await self.run_blocking(self._stall)
        return await self.inner.contains(keys)

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        await self.run_blocking(self._stall)
        return await self.inner.load_into(keys, buffers)

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        await self.run_blocking(self._stall)
        return await self.inner.store(keys, buffers)

    def _stall(self) -> None:
        folder: Path = self.inner.options.path
        if signal_file(folder).exists():
            witness_file(folder).touch()
            threading.Event().wait()


@hookimpl
def offload_wrap_backend(backend: Backend[Any], tier: TierInfo) -> Backend[Any] | None:
    return Stalled(backend)
