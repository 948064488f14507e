"""The cpu backend's memory is taken from the system, and pinned, when the options say so."""

from __future__ import annotations

import asyncio
import errno
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
from tests.support.recorded_pinning import RecordedPinning

KEY = ObjectKey("ab" * 32, "full-u256", bytes(32))
CAPACITY = 2 * PIECE_BYTES + PAGE_BYTES


@pytest.fixture
def executor() -> Iterator[DaemonExecutor]:
    executor = DaemonExecutor(1, "ram")
    yield executor
    executor.shutdown()


def make_backend(executor: DaemonExecutor, pinning: RecordedPinning | None = None, **options: Any) -> CpuBackend:
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


def test_with_a_gpu_all_memory_is_pinned_in_the_background_and_unpinned_at_close(
    executor: DaemonExecutor,
) -> None:
    async def main() -> None:
        pinning = RecordedPinning(all_bytes=CAPACITY)
        backend = make_backend(executor, pinning)
        await backend.open()
        assert await works(backend)
        assert await asyncio.to_thread(pinning.all_are_pinned.wait, 30)
        assert await works(backend)
        await backend.close()
        assert pinning.pinned == {}

    asyncio.run(main())


def test_closed_while_it_pins_it_leaves_nothing_pinned(executor: DaemonExecutor) -> None:
    async def main() -> None:
        pinning = RecordedPinning(all_bytes=CAPACITY)
        backend = make_backend(executor, pinning)
        await backend.open()
        await asyncio.sleep(0)
        await backend.close()
        assert pinning.pinned == {}
        assert not pinning.all_are_pinned.is_set()

    asyncio.run(main())


def test_memory_that_cannot_be_pinned_is_used_unpinned(
    executor: DaemonExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        pinning = RecordedPinning(1, CAPACITY)
        backend = make_backend(executor, pinning)
        await backend.open()
        assert await asyncio.to_thread(pinning.has_failed.wait, 30)
        async with asyncio.timeout(30):
            while "tier 'ram': no more can be pinned. The tier works without that" not in caplog.text:
                await backend.run_blocking(bool)
        assert await works(backend)
        await backend.close()
        assert pinning.pinned == {}

    asyncio.run(main())


def test_with_pin_on_the_tier_opens_only_after_all_is_pinned(executor: DaemonExecutor) -> None:
    async def main() -> None:
        pinning = RecordedPinning(all_bytes=CAPACITY)
        backend = make_backend(executor, pinning, pin="on")
        await backend.open()
        assert pinning.all_are_pinned.is_set()
        await backend.close()
        pinning = RecordedPinning(2, CAPACITY)
        backend = make_backend(executor, pinning, pin="on")
        with pytest.raises(OSError, match="no more can be pinned; pin: on needs that; set pin to auto or off"):
            await backend.open()
        assert pinning.pinned == {}
        await backend.close()

    asyncio.run(main())


def test_pinning_without_a_gpu_is_refused_with_the_cure(executor: DaemonExecutor) -> None:
    async def main() -> None:
        backend = make_backend(executor, pin="on")
        with pytest.raises(OSError, match="torch finds no CUDA GPU in this process; pin: on needs that"):
            await backend.open()
        await backend.close()

    asyncio.run(main())


def test_pin_off_pins_nothing(executor: DaemonExecutor) -> None:
    async def main() -> None:
        pinning = RecordedPinning(0, CAPACITY)
        backend = make_backend(executor, pinning, pin="off")
        await backend.open()
        assert await works(backend)
        await backend.close()
        assert not pinning.has_failed.is_set()

    asyncio.run(main())


def test_memory_is_taken_as_it_is_filled_or_soon_with_prefault(executor: DaemonExecutor) -> None:
    async def main() -> None:
        before = resident_bytes()
        backend = make_backend(executor)
        await backend.open()
        assert await works(backend)
        assert resident_bytes() - before < CAPACITY / 2
        await backend.close()
        backend = make_backend(executor, prefault=True)
        await backend.open()
        async with asyncio.timeout(30):
            while resident_bytes() - before < CAPACITY * 0.9:
                await backend.run_blocking(bool)  # the one thread populates a piece between two calls
                assert await works(backend)
        await backend.close()

    asyncio.run(main())


def test_populating_changes_no_byte() -> None:
    arena = Arena(16 * PAGE_BYTES)
    runs, content = arena.pages.take(3), os.urandom(3 * PAGE_BYTES)
    arena.write(runs, memoryview(content))
    assert not arena.is_resident(arena.pages.take(1))
    assert arena.populate(0, 16)
    assert arena.is_resident(arena.pages.take(1))
    buffer = bytearray(3 * PAGE_BYTES)
    arena.read(runs, memoryview(buffer))
    assert buffer == content


def lending_backend(executor: DaemonExecutor) -> CpuBackend:
    """Return a backend whose memory another process may use."""
    context = BackendContext("ram", executor, lends_to_processes=True)
    return CpuBackend(CpuOptions.model_validate({"capacity": 8 * PAGE_BYTES, "pin": "off"}), context)


def test_the_system_gives_memory_before_another_process_may_use_it(
    executor: DaemonExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, int]] = []
    populate = Arena.populate

    def record(arena: Arena, start_page: int, num_pages: int) -> bool:
        given.append((start_page, num_pages))
        return populate(arena, start_page, num_pages)

    monkeypatch.setattr(Arena, "populate", record)

    async def run() -> None:
        backend = lending_backend(executor)
        await backend.open()
        for _ in range(2):  # the second time they are there
            reservation = await backend.prepare_store([KEY, KEY], [3 * PAGE_BYTES, PAGE_BYTES])
            assert all(reservation.lend())
            await reservation.release()
        await backend.close()

    asyncio.run(run())
    assert given == [(0, 3), (3, 1)]


def test_memory_that_the_system_does_not_give_is_not_lent(
    executor: DaemonExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def refuse(arena: Arena, start_page: int, num_pages: int) -> bool:
        nonlocal calls
        calls += 1
        raise OSError(errno.ENOMEM, "the system did not give memory")

    async def run() -> None:
        backend = lending_backend(executor)
        await backend.open()
        with monkeypatch.context() as patch:
            patch.setattr(Arena, "populate", refuse)
            for _ in range(3):
                with pytest.raises(OSError, match="did not give memory"):
                    await backend.prepare_store([KEY], [8 * PAGE_BYTES])
        assert (await backend.prepare_store([KEY], [8 * PAGE_BYTES])).outcomes == (None,), "capacity is lost"
        await backend.close()

    asyncio.run(run())
    assert calls == 3


def test_a_cancelled_reservation_gives_its_memory_back(
    executor: DaemonExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gate = threading.Event(), threading.Event()

    def wait(arena: Arena, start_page: int, num_pages: int) -> bool:
        begun.set()
        assert gate.wait(30)
        return True

    async def run() -> None:
        backend = lending_backend(executor)
        await backend.open()
        with monkeypatch.context() as patch:
            patch.setattr(Arena, "populate", wait)
            reserving = asyncio.create_task(backend.prepare_store([KEY], [8 * PAGE_BYTES]))
            assert await asyncio.to_thread(begun.wait, 30)
            reserving.cancel()
            gate.set()
            with pytest.raises(asyncio.CancelledError):
                await reserving
        assert (await backend.prepare_store([KEY], [8 * PAGE_BYTES])).outcomes == (None,), "capacity is lost"
        await backend.close()

    asyncio.run(run())


def test_memory_for_other_processes_is_pinned_by_them(executor: DaemonExecutor) -> None:
    async def main(pin: str) -> None:
        pinning = RecordedPinning(0, CAPACITY)
        context = BackendContext("ram", executor, lends_to_processes=True)
        backend = CpuBackend(CpuOptions.model_validate({"capacity": CAPACITY, "pin": pin}), context, pinning)
        await backend.open()
        assert await works(backend)
        assert backend.pins_lent_memory == (pin != "off")
        await backend.close()
        assert not pinning.has_failed.is_set()

    for pin in ("auto", "on", "off"):
        asyncio.run(main(pin))
