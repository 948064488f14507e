"""The backend's coroutines as plain functions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from offload_backend_nfs import NfsBackend

from offload_core.api.backend import LoadOutcome, StoredObject, StoreOutcome
from tests.backends.nfs.conftest import key

T = TypeVar("T")


def run(backend: NfsBackend, work: Callable[[NfsBackend], Awaitable[T]]) -> T:
    """Open ``backend``, do ``work`` and close it, all on one loop."""

    async def main() -> T:
        await backend.open()
        try:
            return await work(backend)
        finally:
            await backend.close()

    return asyncio.run(main())


async def load(backend: NfsBackend, number: int, nbytes: int) -> tuple[LoadOutcome, bytes]:
    buffer = bytearray(nbytes)
    (outcome,) = await backend.load_into([key(number)], [memoryview(buffer)])
    return outcome, bytes(buffer)


async def store(backend: NfsBackend, *objects: tuple[int, bytes]) -> list[StoreOutcome]:
    outcomes = await backend.store([key(n) for n, _ in objects], [memoryview(data) for _, data in objects])
    return list(outcomes)


async def contains(backend: NfsBackend, *numbers: int) -> list[bool]:
    return list(await backend.contains([key(number) for number in numbers]))


async def listed(backend: NfsBackend) -> list[StoredObject]:
    return [found async for batch in backend.list_objects() for found in batch]
