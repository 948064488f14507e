"""When the cpu backend's memory is taken from the system, and pinned."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from offload_backend_cpu import CpuBackend, CpuOptions
from offload_backend_cpu.arena import PAGE_BYTES, Arena
from offload_backend_cpu.memory_setup import PIECE_BYTES

from offload_core.api.backend import BackendContext, LoadOutcome, StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.runtime.threads import DaemonExecutor

KEY = ObjectKey("ab" * 32, "full-u256", bytes(32))
CAPACITY = 2 * PIECE_BYTES + PAGE_BYTES


class Pins:
    """A pinning that notes what is pinned. After ``limit`` pieces it has no more."""

    def __init__(self, limit: int = 1000) -> None:
        self.limit = limit
        self.pinned: dict[int, int] = {}
        self.all_are_pinned = threading.Event()
        self.has_failed = threading.Event()

    def register(self, address: int, nbytes: int) -> None:
        if len(self.pinned) == self.limit:
            self.has_failed.set()
            raise OSError("no more can be pinned")
        self.pinned[address] = nbytes
        if sum(self.pinned.values()) == CAPACITY:
            self.all_are_pinned.set()

    def unregister(self, address: int) -> None:
        del self.pinned[address]


@pytest.fixture
def executor() -> Iterator[DaemonExecutor]:
    executor = DaemonExecutor(1, "ram")
    yield executor
    executor.shutdown()


def made(executor: DaemonExecutor, pinning: Pins | None = None, **options: Any) -> CpuBackend:
    return CpuBackend(
        CpuOptions.model_validate({"capacity": CAPACITY, **options}), BackendContext("ram", executor), pinning
    )


async def works(backend: CpuBackend) -> bool:
    content, buffer = os.urandom(5 * PAGE_BYTES), bytearray(5 * PAGE_BYTES)
    await backend.delete([KEY])
    assert await backend.store([KEY], [memoryview(content)]) == [StoreOutcome.STORED]
    return await backend.load_into([KEY], [memoryview(buffer)]) == [LoadOutcome.HIT] and buffer == content


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_where_it_works_on_a_gpu_all_memory_is_pinned_in_the_background_and_let_go_of_at_the_end(
    executor: DaemonExecutor,
) -> None:
    async def main() -> None:
        pins = Pins()
        backend = made(executor, pins)
        await backend.open()
        assert await works(backend)
        assert await asyncio.to_thread(pins.all_are_pinned.wait, 30)
        assert await works(backend)
        await backend.close()
        assert pins.pinned == {}

    asyncio.run(main())


def test_closed_while_it_pins_it_leaves_nothing_pinned(executor: DaemonExecutor) -> None:
    async def main() -> None:
        pins = Pins()
        backend = made(executor, pins)
        await backend.open()
        await asyncio.sleep(0)
        await backend.close()
        assert pins.pinned == {}
        assert not pins.all_are_pinned.is_set()

    asyncio.run(main())


def test_memory_that_cannot_be_pinned_is_used_as_it_is(
    executor: DaemonExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        pins = Pins(limit=1)
        backend = made(executor, pins)
        await backend.open()
        assert await asyncio.to_thread(pins.has_failed.wait, 30)
        async with asyncio.timeout(30):
            while "tier 'ram': no more can be pinned. The tier works without" not in caplog.text:
                await backend.run_blocking(bool)
        assert await works(backend)
        await backend.close()
        assert pins.pinned == {}

    asyncio.run(main())


def test_pinning_that_is_demanded_is_done_when_the_tier_is_open_or_it_does_not_open(executor: DaemonExecutor) -> None:
    async def main() -> None:
        pins = Pins()
        backend = made(executor, pins, pin="on")
        await backend.open()
        assert pins.all_are_pinned.is_set()
        await backend.close()
        pins = Pins(limit=2)
        backend = made(executor, pins, pin="on")
        with pytest.raises(OSError, match="no more can be pinned; pin: on needs that, pin: auto does without"):
            await backend.open()
        assert pins.pinned == {}
        await backend.close()

    asyncio.run(main())


def test_pinning_without_a_gpu_is_refused_with_the_cure(executor: DaemonExecutor) -> None:
    async def main() -> None:
        backend = made(executor, pin="on")
        with pytest.raises(OSError, match="torch finds no CUDA GPU in this process; pin: on needs that"):
            await backend.open()
        await backend.close()

    asyncio.run(main())


def test_pin_off_pins_nothing(executor: DaemonExecutor) -> None:
    async def main() -> None:
        pins = Pins(limit=0)
        backend = made(executor, pins, pin="off")
        await backend.open()
        assert await works(backend)
        await backend.close()
        assert not pins.has_failed.is_set()

    asyncio.run(main())


def test_memory_is_taken_as_it_is_filled_or_with_prefault_soon(executor: DaemonExecutor) -> None:
    async def main() -> None:
        before = resident_bytes()
        backend = made(executor)
        await backend.open()
        assert await works(backend)
        assert resident_bytes() - before < CAPACITY / 2
        await backend.close()
        backend = made(executor, prefault=True)
        await backend.open()
        async with asyncio.timeout(30):
            while resident_bytes() - before < CAPACITY * 0.9:
                await backend.run_blocking(bool)  # the one thread does the rest between two calls
                assert await works(backend)
        await backend.close()

    asyncio.run(main())


def test_populating_changes_no_byte() -> None:
    arena = Arena(16 * PAGE_BYTES)
    runs, content = arena.pages.take(3), os.urandom(3 * PAGE_BYTES)
    arena.write(runs, memoryview(content))
    assert not arena.is_there(arena.pages.take(1))
    assert arena.populate(0, 16)
    assert arena.is_there(arena.pages.take(1))
    buffer = bytearray(3 * PAGE_BYTES)
    arena.read(runs, memoryview(buffer))
    assert buffer == content
