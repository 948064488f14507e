"""A backend that takes every object and has none: as slow a start as a tier can make, and never a hit."""

from __future__ import annotations

from collections.abc import Sequence

from offload_core.api.backend import Backend, BackendType, LoadOutcome, StoreOutcome
from offload_core.api.capabilities import Capabilities
from offload_core.api.hooks import hookimpl
from offload_core.api.keys import ObjectKey
from offload_core.api.options import BackendOptions

OFFLOAD_API_VERSION = 1


class NoOptions(BackendOptions):
    """None."""


class KeepsNothing(Backend[NoOptions]):
    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(medium="host", persistent=True, shared=True)

    async def contains(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        return [False] * len(keys)

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        return [LoadOutcome.MISS] * len(keys)

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        return [StoreOutcome.STORED] * len(keys)

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        return None


@hookimpl
def offload_register_backends() -> list[BackendType]:
    return [BackendType("keeps-nothing", KeepsNothing, NoOptions)]
