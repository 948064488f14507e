"""A plugin that kills the engine, as ``kill -9`` does, while a store is on its way to a tier.

An I/O process dies with the engine.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from offload_core.api.backend import Backend, StoreOutcome
from offload_core.api.hooks import TierInfo, hookimpl
from offload_core.api.keys import ObjectKey
from offload_core.api.wrapper import BackendWrapper

OFFLOAD_API_VERSION = 1

FATAL_OBJECT = 5
"""Of a tier, as its stores come. A disk gets few objects in a call, and a remote medium many.

The first prompt's stores have ended by then, those of the second have not.
"""


class KilledInStore(BackendWrapper):
    def __init__(self, inner: Backend[Any]) -> None:
        super().__init__(inner)
        self._objects = 0

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        before, self._objects = self._objects, self._objects + len(keys)
        if not before < FATAL_OBJECT <= self._objects:
            return await self.inner.store(keys, buffers)
        storing = asyncio.ensure_future(self.inner.store(keys, buffers))
        await asyncio.wait([storing], timeout=0.0005)
        if "vllm" not in sys.modules:  # an I/O process, whose parent is the engine
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
        return await storing


@hookimpl
def offload_wrap_backend(backend: Backend[Any], tier: TierInfo) -> Backend[Any] | None:
    return KilledInStore(backend)
