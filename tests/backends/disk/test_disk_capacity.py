"""A folder's capacity binds all its processes together, even if some are killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offload_backend_disk import DiskBackend, DiskOptions
from offload_backend_disk.capacity.rows import Segment
from offload_backend_disk.folder.layout import Layout
from offload_backend_disk.folder.processes import Processes
from offload_backend_disk.scan import Scan

from offload_core.api.backend import BackendContext, LoadOutcome, StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.runtime.threads import DaemonExecutor
from tests.backends.disk.conftest import open_account, recover, tmpfs, used
from tests.support.tier_log import LOG

KIB = 1024
Make = Callable[..., DiskBackend]


def key(number: int) -> ObjectKey:
    return ObjectKey("ab" * 32, "full-u256", number.to_bytes(32, "big"))


@pytest.fixture
def bounded(tmp_path: Path) -> Iterator[Make]:
    executor = DaemonExecutor(2, "disk")

    def make(**options: Any) -> DiskBackend:
        settings = {"path": tmp_path / "objects", "capacity": 100 * KIB, "low_watermark": 1, **options}
        return DiskBackend(DiskOptions.model_validate(settings), BackendContext("disk", executor))

    yield make
    executor.shutdown()


async def put(backend: DiskBackend, *numbers: int, nbytes: int = 10 * KIB) -> list[ObjectKey]:
    """Store as a tier does; return the evicted keys."""
    keys = [key(number) for number in numbers]
    reservation = await backend.prepare_store(keys, [nbytes] * len(keys))
    wanted = [one for one, outcome in zip(keys, reservation.outcomes, strict=True) if outcome is None]
    outcomes = await backend.store(wanted, [memoryview(bytes(nbytes))] * len(wanted))
    await reservation.release()
    assert outcomes == [StoreOutcome.STORED] * len(wanted)
    return list(reservation.evicted)


async def scanned(backend: DiskBackend) -> None:
    """Wait for the scan of the folder: until it ends, every store is rejected."""
    probe = ObjectKey("cd" * 32, "probe", b"probe")
    while True:
        reservation = await backend.prepare_store([probe], [0])
        await reservation.release()
        if reservation.outcomes == (None,):
            return


def test_the_least_recently_used_is_evicted_first_across_processes(bounded: Make, tmp_path: Path) -> None:
    async def main() -> None:
        one, other = bounded(), bounded()
        await one.open()
        await other.open()
        await put(one, *range(10))
        load = await other.prepare_load([key(0)])
        await load.release()
        assert await put(other, 1) == []
        assert await put(other, 10, 11) == [key(2), key(3)]
        assert await put(one, 12) == [key(4)]
        assert used(tmp_path) == 100 * KIB
        await one.close()
        await other.close()

    asyncio.run(main())


def test_a_store_uses_its_own_reservation_and_not_a_larger_one_for_the_same_key(bounded: Make) -> None:
    async def main() -> None:
        backend = bounded()
        await backend.open()
        large = await backend.prepare_store([key(0)], [90 * KIB])
        await put(backend, 0, nbytes=1)
        rest = await backend.prepare_store([key(1)], [20 * KIB])
        assert (large.outcomes, rest.outcomes) == ((None,), (StoreOutcome.REJECTED,))
        await large.release()
        await rest.release()
        await put(backend, 1, nbytes=90 * KIB)
        await backend.close()

    asyncio.run(main())


def test_an_eviction_goes_on_to_the_low_watermark(bounded: Make) -> None:
    async def main() -> None:
        backend = bounded(low_watermark=0.5)
        await backend.open()
        await put(backend, *range(10))
        assert await put(backend, 10) == [key(number) for number in range(5)]
        await backend.close()

    asyncio.run(main())


def test_no_process_evicts_an_object_that_another_has_pinned(bounded: Make) -> None:
    async def main() -> None:
        reader, writer = bounded(), bounded()
        await reader.open()
        await writer.open()
        await put(writer, 0)
        pinned, again = await reader.prepare_load([key(0), key(99)]), await reader.prepare_load([key(0)])
        assert pinned.present == (True, False)
        await put(writer, *range(1, 10))
        assert await put(writer, 10, 11) == [key(1), key(2)]
        await again.release()
        assert await put(writer, 12) == [key(3)], "one of two pins was released"
        assert await reader.load_into([key(0)], [memoryview(bytearray(10 * KIB))]) == [LoadOutcome.HIT]
        await pinned.release()
        assert key(0) in await put(writer, *range(20, 30))
        assert await reader.load_into([key(0)], [memoryview(bytearray(10 * KIB))]) == [LoadOutcome.MISS]
        await reader.close()
        await writer.close()

    asyncio.run(main())


def test_an_object_that_does_not_fit_beside_pinned_ones_is_rejected_and_evicts_nothing(bounded: Make) -> None:
    async def main() -> None:
        reader, writer = bounded(), bounded()
        await reader.open()
        await writer.open()
        await put(writer, *range(10))
        pinned = await reader.prepare_load([key(number) for number in range(5)])
        reservation = await writer.prepare_store([key(10)], [60 * KIB])
        assert (reservation.outcomes, reservation.evicted) == ((StoreOutcome.REJECTED,), ())
        await reservation.release()
        await pinned.release()
        await reader.close()
        await writer.close()

    asyncio.run(main())


def test_objects_from_before_there_was_a_capacity_are_counted_and_evicted(bounded: Make, tmp_path: Path) -> None:
    async def main() -> None:
        unbounded = bounded(capacity=None)
        await unbounded.open()
        await put(unbounded, *range(9))
        await unbounded.close()
        backend = bounded()
        await backend.open()
        await scanned(backend)
        assert await put(backend, 10, 11) == [key(0)]
        assert used(tmp_path) == 100 * KIB
        await backend.close()

    asyncio.run(main())


async def store_without_capacity(bounded: Make, *numbers: int) -> None:
    backend = bounded(capacity=None)
    await backend.open()
    await put(backend, *numbers)
    await backend.close()


async def until_counted(backend: DiskBackend, nbytes: int) -> None:
    assert backend._bounded is not None
    while backend._bounded._account.used_bytes != nbytes:  # noqa: ASYNC110 - the work signals no end
        await asyncio.sleep(0.01)


def uncounted(root: Path) -> list[str]:
    return [path.name for path in (root / "objects" / ".offload-core").glob("uncounted-*")]


def test_objects_of_a_run_without_a_capacity_are_counted_by_the_next_run_with_one(
    bounded: Make, tmp_path: Path
) -> None:
    async def main() -> None:
        backend = bounded()
        await backend.open()
        await put(backend, *range(5))
        await backend.close()
        for start in (10, 20, 30):
            await store_without_capacity(bounded, *range(start, start + 9))
        assert len(uncounted(tmp_path)) == 1, "the latest one stands for all"
        backend = bounded()
        await backend.open()
        await until_counted(backend, 32 * 10 * KIB)
        assert len(await put(backend, 40)) == 23
        assert used(tmp_path) == 100 * KIB
        await until_forgotten(tmp_path)
        await backend.close()

    asyncio.run(main())


async def until_forgotten(root: Path) -> None:
    while uncounted(root):  # noqa: ASYNC110 - the work signals no end
        await asyncio.sleep(0.01)


def test_objects_of_a_process_without_a_capacity_are_counted_after_its_end(
    bounded: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload_backend_disk.housekeeping._CHECK_SECONDS", 0.1)  # of ten

    async def main() -> None:
        backend, unbounded = bounded(), bounded(capacity=None)
        await backend.open()
        await put(backend, 0)
        await unbounded.open()
        assert uncounted(tmp_path) == [], "it has stored nothing yet"
        await put(unbounded, *range(1, 6))
        assert not backend._scan.is_needed(), "while it lives it would be needed again and again"
        await unbounded.close()
        await until_counted(backend, 60 * KIB)
        await until_forgotten(tmp_path)
        await backend.close()

    asyncio.run(main())


def test_objects_that_a_run_without_a_capacity_stores_beside_a_scan_are_counted_by_the_next_scan(
    bounded: Make, tmp_path: Path
) -> None:
    async def main() -> None:
        await store_without_capacity(bounded, *range(5))
        account = open_account(tmp_path / "objects", 100 * KIB)
        processes = Processes(tmp_path / "objects", "process", LOG)
        scan = Scan(Layout(tmp_path / "objects"), processes, account, LOG)
        steps = scan.steps()
        next(steps)  # lists the folders
        next(steps)  # scans the only one
        await store_without_capacity(bounded, *range(5, 8))
        for _ in steps:
            pass
        assert scan.is_needed()
        for _ in scan.steps():
            pass
        assert account.used_bytes == 80 * KIB
        assert not scan.is_needed()
        account.close()

    asyncio.run(main())


def test_a_folder_that_is_not_scanned_yet_counts_as_full(tmp_path: Path) -> None:
    account = open_account(tmp_path, 100 * KIB)
    assert account.reserve([(key(0), 1)]) == ([None], [])
    account.finish_scan()
    assert account.reserve([(key(0), 1)])[0] != [None]
    account.close()


def test_a_damaged_account_is_rebuilt_from_the_files_on_the_disk(bounded: Make, tmp_path: Path) -> None:
    async def main(expected: list[ObjectKey]) -> None:
        backend = bounded()
        await backend.open()
        await scanned(backend)
        assert await put(backend, *range(10 * len(expected), 10 * len(expected) + 10)) == expected
        await backend.close()

    asyncio.run(main([]))
    (database,) = (tmp_path / "objects" / ".offload-core").glob("account.sqlite")
    database.write_bytes(b"no database at all" * 100)
    asyncio.run(main([key(number) for number in range(10)]))
    assert used(tmp_path) == 100 * KIB


def test_on_a_full_disk_stores_are_rejected_and_the_account_stays_right() -> None:
    executor = DaemonExecutor(2, "disk")

    async def main(folder: Path) -> None:
        options = DiskOptions.model_validate({"path": folder, "capacity": "2MiB"})
        backend = DiskBackend(options, BackendContext("disk", executor))
        await backend.open()

        async def store(*numbers: int) -> list[StoreOutcome]:
            keys = [key(number) for number in numbers]
            reservation = await backend.prepare_store(keys, [50 * KIB] * len(keys))
            wanted = [one for one, outcome in zip(keys, reservation.outcomes, strict=True) if outcome is None]
            outcomes = iter(await backend.store(wanted, [memoryview(bytes(50 * KIB))] * len(wanted)))
            await reservation.release()
            return [outcome or next(outcomes) for outcome in reservation.outcomes]

        outcomes = await store(*range(40))
        stored = outcomes.count(StoreOutcome.STORED)
        assert stored > 5
        assert outcomes == [StoreOutcome.STORED] * stored + [StoreOutcome.REJECTED] * (40 - stored)
        assert used(folder) == stored * 50 * KIB, "half an object was left"
        assert await store(50, 51) == [StoreOutcome.REJECTED] * 2
        assert await backend.load_into([key(0)], [memoryview(bytearray(50 * KIB))]) == [LoadOutcome.HIT]
        await backend.delete([key(number) for number in range(5)])
        assert await store(50) == [StoreOutcome.STORED]
        await backend.close()
        assert recover(folder, 2048 * KIB) == (used(folder), [])
        assert used(folder) == (stored - 4) * 50 * KIB

    with tmpfs("1m") as folder:
        asyncio.run(main(folder))
    executor.shutdown()


STEPS = st.sampled_from(["reserve", "write", "abandon", "remove", "pin", "use"])


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(STEPS, st.integers(0, 7))))
def test_the_account_agrees_with_the_files_on_the_disk(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    root = tmp_path_factory.mktemp("account")
    layout = Layout(root)
    account = open_account(root, 1000)
    account.finish_scan()
    reserved: list[tuple[int, ObjectKey, int]] = []
    pinned: list[ObjectKey] = []
    try:
        for step, number in steps:
            one = key(number)
            if step == "reserve":
                (granted,), evicted = account.reserve([(one, 100 * number)])
                assert not set(evicted) & set(pinned)
                if granted is not None:
                    reserved.append((granted, one, 100 * number))
            elif step == "write" and reserved:
                _, one, nbytes = reserved[0]
                layout.path(one).parent.mkdir(parents=True, exist_ok=True)
                layout.path(one).write_bytes(bytes(nbytes))
                account.release([reserved.pop(0)[0]], stored=[(one, Segment.UNPROTECTED)])
            elif step == "abandon" and reserved:
                account.release([reserved.pop()[0]])
            elif step == "remove" and one not in pinned:
                account.remove([one])
            elif step == "pin":
                if account.pin([one]) != [None]:
                    pinned.append(one)
            elif step == "use":
                account.record_use([one])
            in_flight = sum(nbytes for _, _, nbytes in reserved)
            assert account.used_bytes == used(root) + in_flight <= 1000
    finally:
        account.close()
