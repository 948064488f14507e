"""What the disk backend does on a file system that works."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from offload_backend_disk import DiskBackend

from offload_core.backend import LoadOutcome, StoreOutcome
from tests.backends.disk.conftest import Disk, files_under, key

HIT, MISS, CORRUPT = LoadOutcome.HIT, LoadOutcome.MISS, LoadOutcome.CORRUPT
STORED = StoreOutcome.STORED


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def test_a_round_trip_and_what_is_not_there(backend: DiskBackend) -> None:
    async def main() -> None:
        await backend.open()
        data = [os.urandom(5000), b"", os.urandom(1)]
        keys = [key(0), key(1), key(2)]
        assert await backend.store(keys, [memoryview(part) for part in data]) == [STORED] * 3
        assert await backend.contains([key(3), key(2), key(0), key(2)]) == [False, True, True, True]
        buffers = [bytearray(b"\xee" * size) for size in (1, 5000, 7, 0)]
        outcomes = await backend.load_into([key(2), key(0), key(3), key(1)], [memoryview(b) for b in buffers])
        assert outcomes == [HIT, HIT, MISS, HIT]
        assert buffers == [data[2], data[0], b"\xee" * 7, b""]
        await backend.close()
        await backend.close()

    asyncio.run(main())


def test_c2_empty_batches(backend: DiskBackend) -> None:
    async def main() -> None:
        await backend.open()
        assert await backend.contains([]) == []
        assert await backend.load_into([], []) == []
        assert await backend.store([], []) == []
        await backend.delete([])

    asyncio.run(main())


def test_c2_repeated_keys_in_one_batch(backend: DiskBackend) -> None:
    async def main() -> None:
        await backend.open()
        data = os.urandom(100)
        assert await backend.store([key(0)] * 3, [memoryview(data)] * 3) == [STORED] * 3
        buffers = [bytearray(100), bytearray(100)]
        assert await backend.load_into([key(0)] * 2, [memoryview(b) for b in buffers]) == [HIT] * 2
        assert buffers == [data, data]
        await backend.delete([key(0), key(0)])
        assert await backend.contains([key(0)]) == [False]

    asyncio.run(main())


def test_what_one_process_stored_another_finds(disk: Disk, tmp_path: Path) -> None:
    async def main() -> None:
        writer, reader = disk(tmp_path / "objects"), disk(tmp_path / "objects")
        await writer.open()
        await reader.open()
        await writer.store([key(0)], [memoryview(b"data")])
        buffer = bytearray(4)
        assert await reader.load_into([key(0)], [memoryview(buffer)]) == [HIT]
        assert buffer == b"data"

    asyncio.run(main())


@pytest.mark.parametrize("size", [0, 3, 5, 5000])
def test_an_object_of_another_size_is_corrupt(backend: DiskBackend, size: int) -> None:
    async def main() -> None:
        await backend.open()
        await backend.store([key(0)], [memoryview(b"four")])
        assert await backend.load_into([key(0)], [memoryview(bytearray(size))]) == [CORRUPT]

    asyncio.run(main())


def test_c12_delete_removes_what_is_there_and_takes_the_rest_as_done(backend: DiskBackend) -> None:
    async def main() -> None:
        await backend.open()
        await backend.store([key(0), key(1)], [memoryview(b"a"), memoryview(b"b")])
        for _ in range(2):
            await backend.delete([key(2), key(0)])
            assert await backend.contains([key(0), key(1), key(2)]) == [False, True, False]

    asyncio.run(main())


def test_objects_lie_in_hashed_sub_folders(backend: DiskBackend, tmp_path: Path) -> None:
    async def main() -> None:
        await backend.open()
        await backend.store([key(0xC5), key(0xC5, "state-u16")], [memoryview(b"a"), memoryview(b"b")])

    asyncio.run(main())
    assert [path.relative_to(tmp_path / "objects") for path in files_under(tmp_path)] == [
        Path("ab" * 32, "full-u256", "c5", "c5" * 32 + ".kv"),
        Path("ab" * 32, "state-u16", "c5", "c5" * 32 + ".kv"),
    ]


@pytest.mark.parametrize("mask", [0, 0o022, 0o377], ids=oct)
def test_only_the_owner_can_look_into_folders_and_files(backend: DiskBackend, tmp_path: Path, mask: int) -> None:
    async def main() -> None:
        await backend.open()
        await backend.store([key(0)], [memoryview(b"somebody's words")])

    with umask(mask):
        asyncio.run(main())
    made = [tmp_path / "objects", *(tmp_path / "objects").rglob("*")]
    assert len(made) == 5
    for path in made:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600 & ~mask), path


def test_a_folder_that_exists_keeps_its_mode(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o750)
    asyncio.run(disk(tmp_path / "shared").open())
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o750


def test_a_folder_removed_at_run_time_is_made_again(backend: DiskBackend, tmp_path: Path) -> None:
    async def main() -> None:
        await backend.open()
        (tmp_path / "objects").rmdir()
        assert await backend.contains([key(0)]) == [False]
        assert await backend.load_into([key(0)], [memoryview(bytearray(4))]) == [MISS]
        assert await backend.store([key(0)], [memoryview(b"data")]) == [STORED]
        assert await backend.contains([key(0)]) == [True]

    asyncio.run(main())


def test_its_medium_outlives_the_process_and_is_shared(backend: DiskBackend) -> None:
    capabilities = backend.capabilities
    assert (capabilities.medium, capabilities.persistent, capabilities.shared) == ("disk", True, True)
