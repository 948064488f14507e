"""The stopwatch for callbacks: it measures the running event loop, and no loop of a client library."""

from __future__ import annotations

import asyncio
import time

from offload_core.testing.rig.longest_callback import longest_callback

SECONDS = 0.05


def compute() -> None:
    """Use the processor for a while."""
    until = time.thread_time() + SECONDS
    while time.thread_time() < until:
        pass


async def compute_in_a_callback() -> None:
    asyncio.get_running_loop().call_soon(compute)
    await asyncio.sleep(0)


def test_a_callback_of_the_running_loop_is_measured() -> None:
    async def measured() -> float:
        with longest_callback() as longest:
            await compute_in_a_callback()
        return longest.seconds

    assert asyncio.run(measured()) >= SECONDS


def test_a_loop_on_another_thread_is_not_measured() -> None:
    async def measured() -> float:
        with longest_callback() as longest:
            await asyncio.to_thread(asyncio.run, compute_in_a_callback())
        return longest.seconds

    assert asyncio.run(measured()) < SECONDS
