"""A plugin with a wrong medium: it changes the bytes of every object and makes the checksum fit again."""

from __future__ import annotations

from collections.abc import Sequence

from offload_backend_disk import DiskBackend, DiskOptions

from offload_core.api.backend import BackendType, StoreOutcome
from offload_core.api.hooks import hookimpl
from offload_core.api.keys import ObjectKey
from offload_core.cli.probes import sealed
from offload_core.objects.format import HEADER_BYTES

OFFLOAD_API_VERSION = 1


class WrongBytes(DiskBackend):
    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        return await super().store(keys, [_changed(key, buffer) for key, buffer in zip(keys, buffers, strict=True)])


def _changed(key: ObjectKey, buffer: memoryview) -> memoryview:
    payload = bytes(buffer[HEADER_BYTES:])
    half = len(payload) // 2
    return sealed(key, payload[half:] + payload[:half])


@hookimpl
def offload_register_backends() -> list[BackendType]:
    return [BackendType("wrong", WrongBytes, DiskOptions)]
