"""A plugin for the tests: a wrapped backend keeps its objects masked, for readers that have the plugin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offload_core.api.backend import Backend, LoadOutcome, StoreOutcome
from offload_core.api.hooks import hookimpl
from offload_core.api.keys import ObjectKey
from offload_core.api.wrapper import BackendWrapper

OFFLOAD_API_VERSION = 1


class Masked(BackendWrapper):
    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        outcomes = await super().load_into(keys, buffers)
        for buffer in buffers:
            buffer[:] = masked(buffer)
        return outcomes

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        return await super().store(keys, [memoryview(masked(buffer)) for buffer in buffers])


def masked(content: bytes | memoryview) -> bytes:
    return bytes(byte ^ 0x5A for byte in content)


@hookimpl
def offload_wrap_backend(backend: Backend[Any], tier: object) -> Backend[Any]:
    return Masked(backend)
