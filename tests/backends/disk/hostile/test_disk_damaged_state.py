"""Control files with any content: the account is set aside and rebuilt by a scan, and nothing hangs."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from offload_backend_disk.capacity.account import Account
from offload_backend_disk.folder.control_files import open_control_file
from offload_backend_disk.folder.layout import Layout
from offload_backend_disk.folder.processes import STATE_FOLDER, Processes
from offload_backend_disk.scan import Scan

from offload_core.api.backend import LoadOutcome, StoreOutcome
from tests.backends.disk.conftest import Disk, key, open_account, store
from tests.support.tier_log import LOG

KIB = 1024
OBJECTS = 6
CAPACITY = 100 * KIB


def make_account(root: Path) -> Path:
    """Make a folder of six objects and its account; return the account's file."""
    for number in range(OBJECTS):
        path = Layout(root).path(key(number))
        path.parent.mkdir(parents=True, mode=0o700)
        path.write_bytes(bytes(10 * KIB))
    account = open_account(root, CAPACITY)
    for _ in Scan(Layout(root), Processes(root, "process", LOG), account, LOG).steps():
        pass
    account.close()
    return root / STATE_FOLDER / "account.sqlite"


def use_until_it_works(root: Path) -> None:
    """Use the account as tiers do. Only an ``OSError`` with the account's name may come, and only for a few calls."""
    account = open_account(root, CAPACITY, "next")
    scan = Scan(Layout(root), Processes(root, "next", LOG), account, LOG)
    errors: list[str] = []
    while len(errors) < 5:
        try:
            _use(account, scan)
            break
        except OSError as error:
            errors.append(str(error))
    account.close()
    assert len(errors) < 5, errors
    assert all("account.sqlite" in error for error in errors), errors


def _use(account: Account, scan: Scan) -> None:
    account.release_dead_reservations()
    if scan.is_needed():
        for _ in scan.steps():
            pass
    numbers, _ = account.reserve([(key(100), 30 * KIB), (key(101), 30 * KIB)])
    account.release([number for number in numbers if number is not None])
    account.touch([key(0), key(1)], [False, True])
    account.flush()
    account.remove([key(2)])
    assert account.used_bytes >= 0


STATEMENTS = {
    "no totals": "DELETE FROM totals",
    "two totals": "INSERT INTO totals DEFAULT VALUES",
    "text for a total": "UPDATE totals SET objects = 'many'",
    "a negative total": "UPDATE totals SET reserved = -1",
    "a null byte in a name": "UPDATE packs SET namespace = 'a' || char(0)",
    "a path for a pack": "UPDATE packs SET pack = '../../../etc'",
    "no packs": "DELETE FROM packs",
    "text for a hash": "UPDATE objects SET hash = 'text' || hex(hash)",
    "text for bytes": "UPDATE objects SET nbytes = 'text'; UPDATE totals SET objects = 61440",
    "a reservation of a path": "INSERT INTO reservations VALUES (1, '../../../etc/passwd', 1, x'00', 1, 0)",
    "a reservation of a blob": "INSERT INTO reservations VALUES (1, x'ff', 1, x'00', 1, 0)",
    "a reservation without a pack": "INSERT INTO reservations VALUES (1, 'dead', 99, x'00', 1, 0)",
    "a reservation in no segment": "INSERT INTO reservations VALUES (1, 'dead', 1, x'00', 1, 99)",
    "no such table": "DROP TABLE objects",
    "one more column": "ALTER TABLE totals ADD COLUMN more",
    "a foreign schema": "DROP TABLE totals; CREATE TABLE totals (a, b); CREATE VIEW v AS SELECT 1",
    "another version and a view": "PRAGMA user_version = 2; DROP TABLE objects; CREATE VIEW objects AS SELECT 1 AS x",
}


@pytest.mark.parametrize("change", STATEMENTS)
def test_an_account_with_a_foreign_content_is_rebuilt(tmp_path: Path, change: str) -> None:
    path = make_account(tmp_path)
    with closing(sqlite3.connect(path)) as sql:
        sql.executescript(STATEMENTS[change])
        sql.commit()
    use_until_it_works(tmp_path)
    account = open_account(tmp_path, CAPACITY, "later")
    present = [number for number in range(OBJECTS) if Layout(tmp_path).path(key(number)).exists()]
    assert account.used_bytes == len(present) * 10 * KIB
    account.close()


def garbage(data: bytes, chance: random.Random) -> bytes:
    return chance.randbytes(len(data))


def cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def changed_bytes(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randrange(1, 40)):
        changed[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(changed)


def changed_page(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data) // 4096) * 4096
    return data[:at] + chance.randbytes(4096) + data[at + 4096 :]


def changed_header(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(100)
    return data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]


DAMAGES: list[Callable[[bytes, random.Random], bytes]] = [garbage, cut, changed_bytes, changed_page, changed_header]


def damage_and_use(root: Path, seeds: range, damage: Callable[[bytes, random.Random], bytes]) -> None:
    path = make_account(root)
    good = path.read_bytes()
    for seed in seeds:
        chance = random.Random(seed)
        for left in path.parent.glob("account.sqlite*"):
            left.unlink()
        path.write_bytes(damage(good, chance))
        if seed % 3 == 0:
            (path.parent / "account.sqlite-wal").write_bytes(chance.randbytes(chance.randrange(9000)))
        if seed % 5 == 0:
            (path.parent / "account.sqlite-shm").write_bytes(chance.randbytes(chance.randrange(40_000)))
        use_until_it_works(root)
        for number in range(OBJECTS):
            with suppress(FileExistsError):
                Layout(root).path(key(number)).parent.mkdir(parents=True, mode=0o700)
            Layout(root).path(key(number)).write_bytes(bytes(10 * KIB))


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_account_with_any_damage_is_used_or_rebuilt(
    tmp_path: Path, damage: Callable[[bytes, random.Random], bytes]
) -> None:
    damage_and_use(tmp_path, range(25), damage)


@pytest.mark.long
@pytest.mark.parametrize("damage", DAMAGES)
def test_an_account_with_any_damage_is_used_or_rebuilt_at_length(
    tmp_path: Path, damage: Callable[[bytes, random.Random], bytes]
) -> None:
    damage_and_use(tmp_path, range(25, 1000), damage)


def test_odd_things_among_the_lock_files_neither_hang_nor_count(disk: Disk, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    locks = tmp_path / "kv" / STATE_FOLDER / "owners"
    locks.mkdir(parents=True)
    os.mkfifo(locks / "fifo")
    (locks / "folder").mkdir()
    (locks / "link").symlink_to(victim)
    (locks / "name with\nspaces").touch()
    (locks / "dead").write_bytes(b"\xff" * 1000)
    (locks.parent / "starting-0123456789abcdef").touch()

    async def main() -> None:
        backend = disk(tmp_path / "kv", capacity="10MiB")
        await backend.open()
        assert await store(backend) is StoreOutcome.STORED
        while (locks / "dead").exists():  # noqa: ASYNC110 - the work signals no end
            await asyncio.sleep(0.01)
        await backend.close()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert sorted(path.name for path in locks.iterdir()) == ["fifo", "folder", "link", "name with\nspaces"]
    assert victim.read_text() == "precious"
    assert list(locks.parent.glob("starting-*")) == []


@pytest.mark.parametrize("failing_call", [1, 2])
def test_after_an_error_while_the_account_is_opened_again_loads_and_stores_work(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_call: int
) -> None:
    num_calls = 0

    def failing_once(*arguments: Any) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls == failing_call:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return open_control_file(*arguments)

    async def main() -> None:
        backend = disk(tmp_path / "kv", capacity="10MiB")
        await backend.open()
        assert await store(backend, 0) is StoreOutcome.STORED
        monkeypatch.setattr("offload_backend_disk.capacity.pins.open_control_file", failing_once)
        (tmp_path / "kv").rename(tmp_path / "away")  # as a user may who wants an empty tier
        (tmp_path / "kv").mkdir(mode=0o700)
        with suppress(OSError):  # the error is this call's, or that of background work
            await store(backend, 1)
        assert num_calls >= failing_call
        for number in (1, 2):  # before and after the account is open again
            reservation = await backend.prepare_load([key(number)])
            assert reservation.present == (False,)
            await reservation.release()
            while await store(backend, number) is not StoreOutcome.STORED:  # noqa: ASYNC110 - until the scan
                await asyncio.sleep(0.01)
        reservation = await backend.prepare_load([key(2)])
        assert reservation.present == (True,)
        assert await backend.load_into([key(2)], [memoryview(bytearray(4))]) == [LoadOutcome.HIT]
        await reservation.release()

    asyncio.run(main())
