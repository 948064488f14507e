"""Another host that makes room: deletes objects at random from all tiers of a configuration, until its input ends.

python -m tests.engine.evictor CONFIG SEED

It prints a line for every round of deletions: how many objects it has deleted by then.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from typing import Any

from offload_core.api.backend import Backend
from offload_core.config.loading import load_config
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.tiers.opening import close_tiers, open_tiers

SHARE = 0.01
PAUSE_SECONDS = 0.3
"""An object lives for half a minute on average: a prompt of several is hit by it often, but not every time."""


def main(config_file: str, seed: int) -> None:
    """Delete some of what is there, again and again."""
    io = IoLoop.acquire()
    tiers = open_tiers(load_config({"config_file": config_file}), io, Counters())
    io.submit(_evict([tier.backend for tier in tiers], random.Random(seed))).result()
    close_tiers(tiers, io, 5.0)
    io.release()


async def _evict(backends: Sequence[Backend[Any]], draw: random.Random) -> None:
    input_ended = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
    deleted = 0
    while not input_ended.done():
        for backend in backends:
            deleted += await _delete_some(backend, draw)
        print(deleted, flush=True)
        await asyncio.wait([input_ended], timeout=PAUSE_SECONDS)


async def _delete_some(backend: Backend[Any], draw: random.Random) -> int:
    keys = [found.key async for batch in backend.list_objects() for found in batch if draw.random() < SHARE]
    await backend.delete(keys)
    return len(keys)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
