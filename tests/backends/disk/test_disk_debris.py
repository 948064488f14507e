"""Files left by dead processes, folders that cannot be scanned, accounts of other versions."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from offload_backend_disk import DiskBackend
from offload_backend_disk.capacity.account import Account
from offload_backend_disk.capacity.database import SCHEMA_VERSION
from offload_backend_disk.capacity.rows import Segment
from offload_backend_disk.folder.layout import Layout
from offload_backend_disk.folder.mount_guard import MountGuard
from offload_backend_disk.folder.processes import STATE_FOLDER, Processes
from offload_backend_disk.scan import Scan

from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.api.keys import ObjectKey
from tests.backends.disk.conftest import Disk, files_under, key, mount, open_account, until, used
from tests.support.tier_log import LOG

KIB = 1024


def begin_to_write(root: Path, process: str, number: int = 0) -> Path:
    """Leave the unfinished file of a process for a key."""
    layout = Layout(root)
    path = Path(layout.temporary(layout.path_string(key(number)), process))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"half")
    return path


def die(root: Path, process: str) -> None:
    """Leave the lock file of a killed process."""
    folder = root / STATE_FOLDER / "owners"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / process).touch()


@pytest.mark.parametrize("options", [{}, {"capacity": 100 * KIB}], ids=["without a limit", "with a limit"])
def test_unfinished_files_of_dead_processes_are_removed_and_those_of_live_ones_are_not(
    disk: Disk, tmp_path: Path, options: dict[str, int]
) -> None:
    root = tmp_path / "objects"
    root.mkdir(mode=0o700)
    alive = Processes(root, "5a5a", LOG)
    alive.register()
    die(root, "dead")
    left, lost = begin_to_write(root, "dead"), begin_to_write(root, "unknown", 1)
    writing, foreign = begin_to_write(root, "5a5a", 2), root / "notes.tmp"
    foreign.write_text("keep")

    async def main() -> None:
        backend = disk(root, **options)
        await backend.open()
        await until(lambda: not left.exists() and not (root / STATE_FOLDER / "owners" / "dead").exists())
        assert not lost.exists()
        assert writing.exists()
        assert foreign.exists()
        await backend.close()

    asyncio.run(main())
    assert [path.name for path in (root / STATE_FOLDER / "owners").iterdir()] == ["5a5a"]
    alive.unregister()


def test_unfinished_files_older_than_the_lock_files_are_removed(disk: Disk, tmp_path: Path) -> None:
    root = tmp_path / "objects"
    left = begin_to_write(root, "1234")

    async def main() -> None:
        backend = disk(root)
        await backend.open()
        await until(lambda: not left.exists())

    asyncio.run(main())


def test_in_a_read_only_folder_unfinished_files_stay_and_nothing_is_logged(
    small_disk: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    die(small_disk, "dead")
    left = begin_to_write(small_disk, "dead")
    mount("-o", "remount,ro", small_disk)

    async def main() -> None:
        for options in ({}, {"capacity": 100 * KIB}):
            backend = disk(small_disk, **options)
            await backend.open()
            assert await backend.contains([key(0)]) == [False]
            held = await backend.prepare_load([key(0)])
            await held.release()
            await backend.close()

    asyncio.run(main())
    assert left.exists()
    assert caplog.records == []


def test_every_temporary_name_is_unique(tmp_path: Path) -> None:
    name = Layout(tmp_path).path_string(key(0))
    names = {Layout.temporary(name, process) for process in ("a", "b") for _ in range(1000)}
    assert len(names) == 2000


def test_a_process_whose_lock_file_was_removed_registers_again_before_it_writes(disk: Disk, tmp_path: Path) -> None:
    backend = disk(tmp_path)

    async def main() -> None:
        await backend.open()
        (own,) = (tmp_path / STATE_FOLDER / "owners").iterdir()
        own.unlink()
        assert await backend.store([key(0)], [memoryview(b"data")]) == [StoreOutcome.STORED]
        assert Processes(tmp_path, "other", LOG).is_alive(own.name)

    asyncio.run(main())


def fill_folder(root: Path, *numbers: int, nbytes: int = 10 * KIB) -> None:
    for number in numbers:
        path = Layout(root).path(key(number))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(nbytes))


def open_scan(root: Path) -> tuple[Scan, Account]:
    account = open_account(root, 100 * KIB)
    return Scan(Layout(root), Processes(root, "process", LOG), account, LOG), account


def test_a_folder_that_cannot_be_scanned_is_named_once_and_the_others_are_scanned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_folder(tmp_path, 1, 2, 3)
    bad = Layout(tmp_path).path(key(2)).parent
    names_in = Layout.names_in

    def failing(folder: Path) -> tuple[list[str], list[tuple[str, str]]]:
        if folder == bad:
            raise OSError(5, "Input/output error", str(folder))
        return names_in(folder)

    scan, account = open_scan(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Layout, "names_in", staticmethod(failing))
        for _ in scan.steps():
            pass
        assert account.used_bytes == 20 * KIB
        assert account.reserve([(key(9), 1)]) == ([None], []), "the folder counts as full until the scan is retried"
        for _ in range(2):
            for _ in scan.steps():
                pass
            assert scan.is_needed()
        assert account.used_bytes == 20 * KIB
        (reservation,), _ = account.reserve([(key(9), 1)])
        assert reservation is not None, "one bad folder would stop all stores for ever"
        account.release([reservation])
    assert [record.getMessage() for record in caplog.records] == [
        f"tier 'tests': {bad} cannot be scanned, and is retried later: [Errno 5] Input/output error: '{bad}'",
        f"tier 'tests': {tmp_path}: its capacity leaves out the folders that cannot be scanned",
    ]
    for _ in scan.steps():
        pass
    assert account.used_bytes == 30 * KIB
    assert not scan.is_needed()
    account.close()


def test_if_no_folder_can_be_scanned_the_account_stays_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_folder(tmp_path, 1, 2)

    def failing(folder: Path) -> tuple[list[str], list[tuple[str, str]]]:
        raise OSError(5, "Input/output error", str(folder))

    monkeypatch.setattr(Layout, "names_in", staticmethod(failing))
    scan, account = open_scan(tmp_path)
    for _ in range(3):
        for _ in scan.steps():
            pass
        assert account.reserve([(key(9), 1)]) == ([None], [])
    account.close()


def test_objects_that_come_and_go_during_the_scan_are_counted_right(tmp_path: Path) -> None:
    fill_folder(tmp_path, 1, 2, 3, 4)
    scan, account = open_scan(tmp_path)
    for number, _ in enumerate(scan.steps()):
        if number == 1:
            account.remove([key(1), key(4)])
            fill_folder(tmp_path, 5, nbytes=7)
            account.release([], stored=[(key(5), Segment.UNPROTECTED)])
    assert account.used_bytes == used(tmp_path) == 20 * KIB + 7
    account.close()


def test_an_object_evicted_during_its_scan_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_folder(tmp_path, 1)
    scan, account = open_scan(tmp_path)
    other = open_account(tmp_path, 100 * KIB, "other")
    names_in = Layout.names_in

    def too_late(folder: Path) -> Any:
        listed = names_in(folder)
        other.remove([key(1)])
        return listed

    monkeypatch.setattr(Layout, "names_in", staticmethod(too_late))
    for _ in scan.steps():
        pass
    assert account.used_bytes == used(tmp_path) == 0
    account.close()
    other.close()


def test_only_one_process_scans_at_a_time(tmp_path: Path) -> None:
    fill_folder(tmp_path, 1)
    account = open_account(tmp_path, 100 * KIB)
    one, other = (Scan(Layout(tmp_path), Processes(tmp_path, "process", LOG), account, LOG) for _ in range(2))
    steps = one.steps()
    next(steps)
    assert list(other.steps()) == []
    steps.close()
    assert list(other.steps()) != []
    account.close()


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_an_account_of_another_version_is_rebuilt_by_a_scan(disk: Disk, tmp_path: Path, version: int) -> None:
    folder = tmp_path / STATE_FOLDER
    folder.mkdir()
    with sqlite3.connect(folder / "account.sqlite") as old:
        old.execute("CREATE TABLE objects (something TEXT)")
        old.execute("CREATE TABLE totals (nbytes INTEGER)")
        old.execute(f"PRAGMA user_version = {version}")
    old.close()
    fill_folder(tmp_path, *range(9))

    async def main() -> None:
        backend = disk(tmp_path, capacity=100 * KIB, low_watermark=1)
        await backend.open()
        evicted: list[ObjectKey] = []
        while not evicted:
            reservation = await backend.prepare_store([key(10)], [20 * KIB])
            evicted += reservation.evicted
            await reservation.release()
        assert evicted == [key(0)]

    asyncio.run(main())


def test_an_account_found_damaged_is_rebuilt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill_folder(tmp_path, *range(9))
    scan, account = open_scan(tmp_path)
    for _ in scan.steps():
        pass
    account.close()
    database = tmp_path / STATE_FOLDER / "account.sqlite"
    content = bytearray(database.read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)
    database.write_bytes(content)
    scan, account = open_scan(tmp_path)
    with pytest.raises(OSError, match="malformed"):
        account.used_bytes  # noqa: B018 - the access is the test
    assert "a scan of the folder rebuilds it" in caplog.text
    assert account.needs_scan()
    for _ in scan.steps():
        pass
    assert account.used_bytes == used(tmp_path)
    account.close()


def test_a_folder_that_was_replaced_at_run_time_gets_a_new_account(disk: Disk, tmp_path: Path) -> None:
    async def main() -> None:
        backend = disk(tmp_path / "objects", capacity=100 * KIB)
        await backend.open()
        await store(backend, 0)
        (tmp_path / "objects").rename(tmp_path / "away")
        for call in (backend.load_into([key(0)], [memoryview(bytearray(4))]), store(backend, 0)):
            with pytest.raises(OSError, match="the folder is gone"):
                await call
        (tmp_path / "objects").mkdir(mode=0o700)
        assert await backend.load_into([key(0)], [memoryview(bytearray(4))]) == [LoadOutcome.MISS]
        outcome = None
        while outcome is not StoreOutcome.STORED:  # rejected until the new folder was scanned
            outcome = await store(backend, 0)
            await asyncio.sleep(0.01)
        await backend.close()
        await backend.close()

    asyncio.run(main())
    assert used(tmp_path / "objects") == 10


async def store(backend: DiskBackend, number: int) -> StoreOutcome:
    reservation = await backend.prepare_store([key(number)], [10])
    outcome = reservation.outcomes[0] or (await backend.store([key(number)], [memoryview(bytes(10))]))[0]
    await reservation.release()
    return outcome


def test_a_backend_whose_folder_is_gone_can_be_closed(disk: Disk, tmp_path: Path) -> None:
    async def main() -> None:
        backend = disk(tmp_path / "objects", capacity=100 * KIB)
        await backend.open()
        await store(backend, 0)
        held = await backend.prepare_load([key(0)])
        assert held.present == (True,)
        (tmp_path / "objects").rename(tmp_path / "away")
        await held.release()
        await backend.close()

    asyncio.run(main())


def test_the_close_of_an_account_whose_folder_is_gone_creates_nothing(tmp_path: Path) -> None:
    account = open_account(tmp_path / "objects", 100 * KIB)
    account.record_use([key(0)])
    assert account.needs_flush
    (tmp_path / "objects").rename(tmp_path / "away")
    account.close()
    assert not (tmp_path / "objects").exists()


@pytest.mark.parametrize("options", [{}, {"capacity": 100 * KIB}], ids=["without a limit", "with a limit"])
def test_after_an_unmount_nothing_is_written_below_the_mount_point_until_it_is_back(
    small_disk: Path, disk: Disk, options: dict[str, int]
) -> None:
    root = small_disk / "objects"

    async def main() -> None:
        backend = disk(root, **options)
        await backend.open()
        assert await store(backend, 0) is StoreOutcome.STORED
        away = small_disk.with_name(small_disk.name + "-away")
        away.mkdir()
        mount("--move", small_disk, away)
        try:
            for call in (store(backend, 1), store(backend, 1), backend.contains([key(0)])):
                with pytest.raises(OSError, match="mount its file system again"):
                    await call
            assert files_under(small_disk) == []
            root.mkdir(mode=0o700)  # was not made
            for call in (store(backend, 1), backend.contains([key(0)])):
                with pytest.raises(OSError, match="is on another file system"):
                    await call
            root.rmdir()
        finally:
            mount("--move", away, small_disk)
            away.rmdir()
        assert await store(backend, 1) is StoreOutcome.STORED
        assert await backend.contains([key(0), key(1)]) == [True, True]
        await backend.close()

    asyncio.run(main())
    assert len(files_under(root)) == 2


def test_only_the_first_open_creates_the_folder_and_never_its_parents(tmp_path: Path) -> None:
    guard = MountGuard(tmp_path / "a" / "b")
    with pytest.raises(OSError, match="its parent folder does not exist"):
        guard.open()
    (tmp_path / "a").mkdir()
    guard.open()
    assert guard.root.is_dir()
    guard.root.rmdir()
    with pytest.raises(OSError, match="the folder is gone"):
        guard.open()
    assert not guard.root.exists()
