"""A plugin that signals a server in the middle of a tier's call, when a file orders it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from offload_core.api.backend import Backend, LoadOutcome, StoreOutcome
from offload_core.api.hooks import TierInfo, hookimpl
from offload_core.api.keys import ObjectKey
from offload_core.api.wrapper import BackendWrapper

OFFLOAD_API_VERSION = 1

ORDER_VARIABLE = "OFFLOAD_TEST_ORDER"
"""The environment variable with the path of the order."""

T = TypeVar("T")
CallName = Literal["load_into", "store"]


def write_order(path: Path, call: CallName, pids: Sequence[int], number: signal.Signals) -> None:
    """Order that the next such call with any object sends the signal to these processes, once it is under way."""
    draft = path.with_name("draft")
    draft.write_text(json.dumps([call, list(pids), number]))
    draft.rename(path)


class SignalsInCalls(BackendWrapper):
    def __init__(self, inner: Backend[Any], order: Path) -> None:
        super().__init__(inner)
        self._order = order

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        return await self._signal_in("load_into", keys, self.inner.load_into(keys, buffers))

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        return await self._signal_in("store", keys, self.inner.store(keys, buffers))

    async def _signal_in(self, call: CallName, keys: Sequence[ObjectKey], answer: Awaitable[T]) -> T:
        running = asyncio.ensure_future(answer)
        await asyncio.wait([running], timeout=0.0005)
        ordered = self._take_order(call) if keys else None
        if ordered is not None:
            pids, number = ordered
            for pid in pids:
                os.kill(pid, number)
        return await running

    def _take_order(self, call: CallName) -> tuple[list[int], int] | None:
        try:
            ordered_call, pids, number = json.loads(self._order.read_text())
        except FileNotFoundError:
            return None
        if ordered_call != call:
            return None
        self._order.unlink()
        return pids, number


@hookimpl
def offload_wrap_backend(backend: Backend[Any], tier: TierInfo) -> Backend[Any] | None:
    return SignalsInCalls(backend, Path(os.environ[ORDER_VARIABLE]))
