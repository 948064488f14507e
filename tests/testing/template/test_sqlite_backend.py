"""Behaviour of the template's backend beyond the contract: between processes, and with damaged files."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import hypothesis
import pytest
from offload_backend_sqlite import SqliteBackend, SqliteOptions
from offload_backend_sqlite.plugin import SQLITE

from offload_core.api.backend import BackendContext, LoadOutcome, StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.runtime.threads import DaemonExecutor
from offload_core.testing.state_machine.machine import CAPACITY_BYTES, STATE_MACHINE_SETTINGS, check_with_state_machine
from tests.testing.template.conftest import CleanEnvironment

HIT, MISS, CORRUPT = LoadOutcome.HIT, LoadOutcome.MISS, LoadOutcome.CORRUPT
STORED, REJECTED = StoreOutcome.STORED, StoreOutcome.REJECTED

Open = Callable[..., SqliteBackend]


def key(number: int) -> ObjectKey:
    return ObjectKey("ab" * 32, "full-u256", bytes([number]) * 32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv.sqlite"


@pytest.fixture
def sqlite(path: Path) -> Iterator[Open]:
    """Make backends on one file. Its capacity is 16 MiB, and they wait for each other as long as they are told."""
    executors: list[DaemonExecutor] = []

    def make(busy_seconds: float = 30) -> SqliteBackend:
        executors.append(DaemonExecutor(2, f"sqlite-{len(executors)}"))
        options = SqliteOptions.model_validate(
            {"path": path, "capacity": "16MiB", "busy_timeout_seconds": busy_seconds}
        )
        return SqliteBackend(options, BackendContext("sqlite", executors[-1]))

    yield make
    for executor in executors:
        executor.shutdown()


def num_holds(path: Path) -> int:
    with closing(sqlite3.connect(path)) as db:
        return int(db.execute("SELECT count(*) FROM holds").fetchone()[0])


def test_the_state_machine_finds_no_broken_clause(path: Path) -> None:
    options = {"path": path, "capacity": CAPACITY_BYTES}
    some = hypothesis.settings(STATE_MACHINE_SETTINGS, max_examples=30)  # the long tests run them all
    check_with_state_machine(SQLITE, options, capacity_bytes=CAPACITY_BYTES, settings=some)


RESERVE_AND_DIE = """if True:
    import asyncio, os, sys
    from pathlib import Path
    from offload_backend_sqlite import SqliteBackend, SqliteOptions
    from offload_core.api.backend import BackendContext
    from offload_core.api.keys import ObjectKey
    from offload_core.runtime.threads import DaemonExecutor

    async def main():
        options = SqliteOptions(path=Path(sys.argv[1]), capacity=16 << 20)
        backend = SqliteBackend(options, BackendContext("dying", DaemonExecutor(1, "dying")))
        await backend.open()
        reservation = await backend.prepare_store([ObjectKey("cd" * 32, "full-u256", b"1")], [15 << 20])
        print(*reservation.outcomes, flush=True)
        os._exit(0)

    asyncio.run(main())"""


@pytest.mark.parametrize("opened", ["before", "after"])
def test_the_reservation_of_a_dead_process_is_released(
    clean: CleanEnvironment, sqlite: Open, path: Path, opened: str
) -> None:
    async def main() -> None:
        backend = sqlite()
        if opened == "before":
            await backend.open()
        died = clean.run("-c", RESERVE_AND_DIE, path)
        assert died.stdout == "None\n", died.stderr
        assert num_holds(path) == 1
        if opened == "after":
            await backend.open()
            assert num_holds(path) == 0
        reservation = await backend.prepare_store([key(0)], [2 << 20])
        assert reservation.outcomes == (None,)
        await reservation.release()
        await backend.close()
        assert [file.name for file in path.parent.iterdir()] == [path.name]

    asyncio.run(main())


def test_the_reservation_of_a_live_process_is_kept(sqlite: Open) -> None:
    async def main() -> None:
        first, second, third = sqlite(), sqlite(), sqlite()
        await first.open()
        await second.open()
        reservation = await first.prepare_store([key(0)], [15 << 20])
        await third.open()
        for other in (second, third):
            assert (await other.prepare_store([key(1)], [2 << 20])).outcomes == (REJECTED,)
        await reservation.release()
        assert (await second.prepare_store([key(1)], [2 << 20])).outcomes == (None,)
        for backend in (first, second, third):
            await backend.close()

    asyncio.run(main())


def test_recently_used_objects_and_those_another_client_loads_are_not_evicted(sqlite: Open) -> None:
    async def main() -> None:
        writer, reader = sqlite(), sqlite()
        await writer.open()
        await reader.open()
        megabytes = memoryview(bytes(5 << 20))
        assert await writer.store([key(0), key(1), key(2)], [megabytes] * 3) == [STORED] * 3
        loading = await reader.prepare_load([key(1), key(9)])
        assert loading.present == (True, False)
        await (await writer.prepare_load([key(0)])).release()
        storing = await writer.prepare_store([key(3), key(4)], [len(megabytes)] * 2)
        assert (storing.outcomes, storing.evicted) == ((None, None), (key(2), key(0)))
        assert (await writer.prepare_store([key(5)], [len(megabytes)])).outcomes == (REJECTED,)
        await storing.release()
        await loading.release()
        for backend in (writer, reader):
            await backend.close()

    asyncio.run(main())


def test_the_reservation_of_a_cancelled_call_is_released(sqlite: Open, path: Path) -> None:
    async def main() -> None:
        backend = sqlite()
        await backend.open()
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            reserving = asyncio.create_task(backend.prepare_store([key(0)], [1000]))
            for _ in range(5):
                await asyncio.sleep(0)  # a few steps take it to a thread, where it waits for the lock
            reserving.cancel()
            other.execute("COMMIT")
        with pytest.raises(asyncio.CancelledError):
            await reserving
        assert num_holds(path) == 0
        await backend.close()

    asyncio.run(main())


def test_only_the_owner_can_read_any_of_the_files(sqlite: Open, path: Path) -> None:
    async def main() -> None:
        backend = sqlite()
        await backend.open()
        await backend.store([key(0)], [memoryview(b"somebody's words")])
        modes = {file.name: oct(stat.S_IMODE(file.stat().st_mode)) for file in path.parent.iterdir()}
        assert {path.name, f"{path.name}-wal", f"{path.name}-shm"} < set(modes)
        assert set(modes.values()) == {"0o600"}
        await backend.close()

    asyncio.run(main())


@pytest.mark.parametrize("attempt", range(10))
def test_many_clients_create_one_file_at_once(sqlite: Open, attempt: int) -> None:
    async def main() -> None:
        backends = [sqlite() for _ in range(8)]
        await asyncio.gather(*(backend.open() for backend in backends))
        await backends[0].store([key(0)], [memoryview(b"here")])
        assert await asyncio.gather(*(backend.contains([key(0)]) for backend in backends)) == [[True]] * 8
        await asyncio.gather(*(backend.close() for backend in backends))

    asyncio.run(main())


def test_an_object_whose_pages_are_damaged_is_corrupt_and_its_neighbours_are_not(sqlite: Open, path: Path) -> None:
    async def store() -> None:
        backend = sqlite()
        await backend.open()
        await backend.store([key(1), key(2), key(3)], [memoryview(bytes([fill]) * 1_000_000) for fill in (1, 2, 3)])
        await backend.close()

    async def load() -> list[LoadOutcome]:
        backend = sqlite()
        await backend.open()
        buffers = [memoryview(bytearray(1_000_000)) for _ in range(4)]
        outcomes = await backend.load_into([key(1), key(2), key(3), key(4)], buffers)
        await backend.close()
        return list(outcomes)

    asyncio.run(store())
    page = path.read_bytes().find(b"\2" * 30_000) // 32768
    with path.open("r+b") as file:
        file.seek(page * 32768)
        file.write(b"\xff\xff\xff\xff")  # the number of the object's next page
    assert asyncio.run(load()) == [HIT, CORRUPT, HIT, MISS]


@pytest.mark.parametrize("content", [b"not a database" * 1000, b""], ids=["garbage", "empty"])
def test_a_file_that_is_no_database_is_refused_and_left_as_it_was(sqlite: Open, path: Path, content: bytes) -> None:
    path.write_bytes(content)

    async def main() -> None:
        backend = sqlite()
        with pytest.raises(OSError, match=r"not a database.*kv\.sqlite"):
            await backend.open()
        await backend.close()

    asyncio.run(main())
    assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_a_database_of_another_program_is_refused(sqlite: Open, path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE objects (theirs)")

    async def main() -> None:
        with pytest.raises(OSError, match="not a database of this version of this backend"):
            await sqlite().open()

    asyncio.run(main())


def test_a_file_that_stays_locked_fails_only_the_batch(sqlite: Open, path: Path) -> None:
    async def main() -> None:
        backend = sqlite(busy_seconds=0.5)
        await backend.open()
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(OSError, match=r"database is locked.*kv\.sqlite"):
                await backend.store([key(0)], [memoryview(b"data")])
            assert await backend.contains([key(0)]) == [False]
        assert await backend.store([key(0)], [memoryview(b"data")]) == [STORED]
        await backend.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "cure"), [("missing/kv.sqlite", "create it, or mount the disk"), ("", "name a file in it")]
)
def test_a_path_that_cannot_be_a_file_is_refused_with_the_cure(tmp_path: Path, name: str, cure: str) -> None:
    with pytest.raises(ValueError, match=cure):
        SqliteOptions.model_validate({"path": tmp_path / name, "capacity": 1})
