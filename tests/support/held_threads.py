"""Lookups of a backend while all of its threads for loads and stores are held."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

from offload_core.api import Backend, BackendType, ObjectKey
from offload_core.testing import open_backend

SECONDS = 30
KEY = ObjectKey("ab" * 32, "full-u16", b"\1" * 32)


def lookups_beside_held_threads(backend_type: BackendType, options: Mapping[str, Any]) -> list[list[bool]]:
    """Store an object, hold the tier's only thread, and return the answers of ``contains`` and ``prepare_load``."""

    async def main() -> list[list[bool]]:
        gate = threading.Event()
        async with open_backend(backend_type, options, threads=1) as backend:
            await backend.store([KEY], [memoryview(bytes(1000))])
            held = asyncio.ensure_future(backend.run_blocking(gate.wait, 2 * SECONDS))
            asked = asyncio.ensure_future(_ask(backend))
            try:
                await asyncio.wait([asked], timeout=SECONDS)
                assert asked.done(), "a lookup waits for the thread of a transfer"
            finally:
                gate.set()
                await asyncio.wait([held, asked])
            return asked.result()

    async def _ask(backend: Backend[Any]) -> list[list[bool]]:
        present = await backend.contains([KEY])
        reservation = await backend.prepare_load([KEY])
        await reservation.release()
        return [list(present), list(reservation.present)]

    return asyncio.run(main())
