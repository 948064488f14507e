"""Lookups and loads of a backend while the threads for other work are held."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

from offload_core.api import Backend, BackendType, LoadCheck, LoadOutcome, ObjectKey
from offload_core.testing import open_backend

SECONDS = 30
KEY = ObjectKey("ab" * 32, "full-u16", b"\1" * 32)
CONTENT = bytes(range(256)) * 16 * 1024
"""Large enough that no backend copies it on the loop."""


def check_that_nothing_waits_for_slower_work(backend_type: BackendType, options: Mapping[str, Any]) -> None:
    """Check that loads do not wait for the tier's only thread for stores, and lookups not for that for loads either.

    Raises:
        TimeoutError: something waits.
        AssertionError: an answer is wrong.
    """

    async def main() -> None:
        async with open_backend(backend_type, options, threads=1) as backend:
            await backend.store([KEY], [memoryview(CONTENT)])
            stores, loads = threading.Event(), threading.Event()
            held = [
                asyncio.ensure_future(backend.run_blocking(stores.wait, 2 * SECONDS)),
                asyncio.ensure_future(backend.run_load(loads.wait, 2 * SECONDS)),
            ]
            await asyncio.sleep(0)  # both are in their queues now
            try:
                async with asyncio.timeout(SECONDS):
                    await _look_up(backend)
                    loads.set()
                    await _load(backend)
                    assert not held[0].done()
            finally:
                stores.set()
                loads.set()
                await asyncio.wait(held)

    asyncio.run(main())


async def _look_up(backend: Backend[Any]) -> None:
    assert list(await backend.contains([KEY])) == [True]
    reservation = await backend.prepare_load([KEY])
    await reservation.release()
    assert list(reservation.present) == [True]


async def _load(backend: Backend[Any]) -> None:
    content = bytearray(len(CONTENT))
    assert list(await backend.load_into([KEY], [memoryview(content)])) == [LoadOutcome.HIT]
    assert content == CONTENT
    if not backend.loads_in_one_call:
        return
    content[:] = bytes(len(CONTENT))
    assert list(await backend.load_and_check([KEY], [memoryview(content)], [_NoCheck()])) == [LoadOutcome.HIT]
    assert content == CONTENT


class _NoCheck(LoadCheck):
    def filled(self, nbytes: int) -> bool:
        return False
