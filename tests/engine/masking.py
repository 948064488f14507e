"""A plugin that masks every object on its way to the medium and writes down what it observes.

Without it, what is on the medium cannot be read: the tests see whether it was active.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offload_core.api.backend import Backend, LoadOutcome, StoreOutcome
from offload_core.api.events import Event
from offload_core.api.hooks import TierInfo, hookimpl
from offload_core.api.keys import ObjectKey
from offload_core.api.wrapper import BackendWrapper

OFFLOAD_API_VERSION = 1

_MASK = bytes(byte ^ 0x5A for byte in range(256))


_logs: dict[str, Path] = {}
"""Per tier, the file for its events, beside the tier's folder."""


def masked(content: memoryview | bytes) -> bytes:
    return bytes(content).translate(_MASK)


class Masking(BackendWrapper):
    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        outcomes = await self.inner.load_into(keys, buffers)
        came = [buffer for buffer, outcome in zip(buffers, outcomes, strict=True) if outcome is LoadOutcome.HIT]
        await self.run_blocking(_unmask, came)
        return outcomes

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        copies = await self.run_blocking(lambda: [memoryview(masked(buffer)) for buffer in buffers])
        return await self.inner.store(keys, copies)


def _unmask(buffers: Sequence[memoryview]) -> None:
    for buffer in buffers:
        buffer[:] = masked(buffer)


@hookimpl
def offload_wrap_backend(backend: Backend[Any], tier: TierInfo) -> Backend[Any] | None:
    if tier.type != "disk":
        return None
    _logs[tier.name] = backend.options.path.with_name("events.jsonl")
    return Masking(backend)


@hookimpl
def offload_observe(event: Event) -> None:
    with _logs[event.tier].open("a") as log:
        log.write(json.dumps({"event": type(event).__name__, **dataclasses.asdict(event)}, default=str) + "\n")
