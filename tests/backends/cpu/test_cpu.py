"""The memory of the cpu backend: eviction, pins and pages."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from offload_backend_cpu import CpuBackend, CpuOptions
from offload_backend_cpu.arena import PAGE_BYTES, Arena
from offload_backend_cpu.free_pages import Run

from offload_core.api.backend import BackendContext, StoreOutcome
from offload_core.api.errors import BackendError, ConfigError
from offload_core.api.keys import ObjectKey
from offload_core.config.loading import load_config
from offload_core.runtime.threads import DaemonExecutor

STORED, ALREADY_PRESENT, REJECTED = StoreOutcome.STORED, StoreOutcome.ALREADY_PRESENT, StoreOutcome.REJECTED


def key(number: int) -> ObjectKey:
    return ObjectKey("ab" * 32, "full-u256", bytes([number]) * 32)


@pytest.fixture
def backend() -> Iterator[CpuBackend]:
    """A backend with a capacity of eight objects of a page."""
    executor = DaemonExecutor(2, "ram")
    yield CpuBackend(CpuOptions.model_validate({"capacity": 8 * PAGE_BYTES}), BackendContext("ram", executor))
    executor.shutdown()


async def put(backend: CpuBackend, *numbers: int, spare: bool = False) -> tuple[list[StoreOutcome], list[ObjectKey]]:
    """Store objects of one page each, as a tier does."""
    keys = [key(number) for number in numbers]
    reservation = await backend.prepare_store(keys, [PAGE_BYTES] * len(keys), [spare] * len(keys))
    wanted = [key for key, outcome in zip(keys, reservation.outcomes, strict=True) if outcome is None]
    stored = iter(await backend.store(wanted, [memoryview(k.chunk_hash * (PAGE_BYTES // 32)) for k in wanted]))
    await reservation.release()
    return [outcome or next(stored) for outcome in reservation.outcomes], list(reservation.evicted)


async def present(backend: CpuBackend) -> list[int]:
    return [number for number in range(20) if (await backend.contains([key(number)]))[0]]


def test_the_least_recently_used_is_evicted_first_whether_stored_loaded_or_offered_again(backend: CpuBackend) -> None:
    async def main() -> None:
        await backend.open()
        await put(backend, *range(8))
        reservation = await backend.prepare_load([key(0)])
        await reservation.release()
        assert await put(backend, 1) == ([ALREADY_PRESENT], [])
        assert await put(backend, 8, 9, 10) == ([STORED] * 3, [key(2), key(3), key(4)])
        assert await present(backend) == [0, 1, 5, 6, 7, 8, 9, 10]

    asyncio.run(main())


def test_an_object_that_could_not_fit_evicts_nothing(backend: CpuBackend) -> None:
    async def main() -> None:
        await backend.open()
        await put(backend, 0)
        reservation = await backend.prepare_store([key(1)], [8 * PAGE_BYTES + 1])
        assert (reservation.outcomes, reservation.evicted) == ((REJECTED,), ())
        await reservation.release()
        assert await present(backend) == [0]

    asyncio.run(main())


def test_a_spare_object_that_is_offered_again_is_kept_only_if_it_is_offered_so(backend: CpuBackend) -> None:
    async def main() -> None:
        await backend.open()
        await put(backend, 0, 1, 2, spare=True)
        await put(backend, 3, 4, 5, 6, 7)
        assert await put(backend, 0, spare=True) == ([ALREADY_PRESENT], [])
        assert await put(backend, 1) == ([ALREADY_PRESENT], [])
        assert await put(backend, 3, spare=True) == ([ALREADY_PRESENT], [])
        assert await put(backend, 8, 9, 10) == ([STORED] * 3, [key(0), key(2), key(3)])

    asyncio.run(main())


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_an_object_that_two_calls_store_at_once_is_kept_if_either_keeps_it(
    backend: CpuBackend, order: list[int], at_once: bool
) -> None:
    async def main() -> None:
        await backend.open()
        reservations = [await backend.prepare_store([key(0)], [PAGE_BYTES], [number == 0]) for number in order]
        stores = [backend.store([key(0)], [memoryview(bytes(PAGE_BYTES))]) for _ in order]
        if at_once:
            await asyncio.gather(*stores)
        else:
            for store in stores:
                await store
        for reservation in reservations:
            await reservation.release()
        await put(backend, *range(1, 7))
        await put(backend, 7, spare=True)
        assert await put(backend, 8) == ([STORED], [key(7)])

    asyncio.run(main())


def test_a_touch_of_an_object_in_use_changes_nothing(backend: CpuBackend) -> None:
    async def main() -> None:
        await backend.open()
        await put(backend, *range(8))
        reservation = await backend.prepare_load([key(0), key(1)])
        await backend.touch([key(0), key(1), key(2)], [True, False, True])
        await reservation.release()
        assert await put(backend, 8, 9) == ([STORED] * 2, [key(2), key(3)])

    asyncio.run(main())


def test_an_object_that_is_deleted_while_it_is_pinned_keeps_its_bytes_until_it_is_released(
    backend: CpuBackend,
) -> None:
    async def main() -> None:
        await backend.open()
        await put(backend, 0)
        reservation = await backend.prepare_load([key(0)])
        await backend.delete([key(0)])
        assert await backend.contains([key(0)]) == [False]
        assert await put(backend, *range(1, 9)) == ([STORED] * 7 + [REJECTED], [])
        await reservation.release()
        assert await put(backend, 8) == ([STORED], [])

    asyncio.run(main())


def test_a_store_without_a_reservation_evicts_nothing_since_it_could_not_report_it(backend: CpuBackend) -> None:
    async def main() -> None:
        await backend.open()
        await put(backend, *range(8))
        assert await backend.store([key(8)], [memoryview(bytes(PAGE_BYTES))]) == [REJECTED]
        assert await present(backend) == list(range(8))

    asyncio.run(main())


def test_nothing_works_before_it_is_opened_or_after_it_is_closed(backend: CpuBackend) -> None:
    async def main() -> None:
        with pytest.raises(BackendError, match="'ram' is not open"):
            await backend.prepare_store([key(0)], [1])
        await backend.open()
        await put(backend, 0)
        reservation = await backend.prepare_load([key(0)])
        await backend.close()
        await reservation.release()
        assert await backend.contains([key(0)]) == [False]

    asyncio.run(main())


@pytest.mark.parametrize(("capacity", "message"), [("2 KiB", "4096"), ("lots", "is not a size"), (None, "missing")])
def test_an_invalid_capacity_is_refused(capacity: str | None, message: str) -> None:
    entry = {"name": "ram", "type": "cpu"} | ({} if capacity is None else {"capacity": capacity})
    with pytest.raises(ConfigError, match=message):
        load_config({"backends": [entry]})


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3 * PAGE_BYTES + 1)), max_size=30))
def test_the_arena_gives_every_object_pages_of_its_own(steps: list[tuple[bool, int]]) -> None:
    arena = Arena(16 * PAGE_BYTES)
    held: list[tuple[tuple[Run, ...], bytes]] = []
    for take, size in steps:
        if take and arena.pages_for(size) <= arena.pages.num_free:
            runs, content = arena.pages.take(arena.pages_for(size)), os.urandom(size)
            arena.write(runs, memoryview(content))
            held.append((runs, content))
        elif held:
            arena.pages.release(held.pop(size % len(held))[0])
        assert arena.pages.num_free == 16 - sum(arena.pages_for(len(content)) for _, content in held)
        for runs, content in held:
            target = bytearray(len(content))
            arena.read(runs, memoryview(target))
            assert target == content


@pytest.mark.parametrize("run_pages", [1, 2, 20], ids="runs of {}".format)
@pytest.mark.parametrize("short_bytes", [0, 1, PAGE_BYTES - 1, PAGE_BYTES])
def test_an_object_in_several_runs_is_whole_and_its_neighbours_are_untouched(run_pages: int, short_bytes: int) -> None:
    arena = Arena(4 * (run_pages + 1) * PAGE_BYTES)
    holes, walls = [], []
    for _ in range(4):
        holes.append(arena.pages.take(run_pages))
        walls.append(arena.pages.take(1))
        arena.write(walls[-1], memoryview(b"wall" * (PAGE_BYTES // 4)))
    for hole in holes:
        arena.pages.release(hole)
    runs = arena.pages.take(4 * run_pages)
    assert len(runs) == 4
    content, buffer = os.urandom(4 * run_pages * PAGE_BYTES - short_bytes), bytearray(4 * run_pages * PAGE_BYTES)
    arena.write(runs, memoryview(content).toreadonly())
    arena.read(runs, memoryview(buffer)[: len(content)])
    assert buffer == content + bytes(short_bytes)
    for wall in walls:
        beside = bytearray(PAGE_BYTES)
        arena.read(wall, memoryview(beside))
        assert beside == b"wall" * (PAGE_BYTES // 4)


@pytest.mark.parametrize("is_shared", [False, True], ids=["private", "shared"])
def test_memory_that_the_system_does_not_have_is_an_error_with_the_size_and_the_cure(*, is_shared: bool) -> None:
    capacity = 1 << 60
    with pytest.raises(OSError, match=rf"cannot map {capacity} bytes of host memory; lower the tier's capacity"):
        Arena(capacity, is_shared=is_shared)


def test_a_reservation_from_before_a_close_returns_no_pages_to_the_next_memory(backend: CpuBackend) -> None:
    async def main() -> None:
        await backend.open()
        reservation = await backend.prepare_store([key(0)], [4 * PAGE_BYTES])
        await backend.close()
        await backend.open()
        await backend.prepare_store([key(1)], [2 * PAGE_BYTES])
        await reservation.release()
        assert (await backend.prepare_store([key(2)], [7 * PAGE_BYTES])).outcomes == (REJECTED,), "pages in use"
        await backend.close()

    asyncio.run(main())
