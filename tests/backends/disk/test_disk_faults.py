"""The disk backend on file systems that are full, read-only or missing."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest
from offload_backend_disk import DiskBackend

from offload_core.backend import LoadOutcome, StoreOutcome
from tests.backends.disk.conftest import Disk, files_under, key, mount

HIT, MISS = LoadOutcome.HIT, LoadOutcome.MISS
KIB = 1024


def load(backend: DiskBackend, number: int, size: int) -> tuple[LoadOutcome, bytes]:
    buffer = bytearray(size)
    (outcome,) = asyncio.run(_load(backend, number, buffer))
    return outcome, bytes(buffer)


async def _load(backend: DiskBackend, number: int, buffer: bytearray) -> list[LoadOutcome]:
    return list(await backend.load_into([key(number)], [memoryview(buffer)]))


def store(backend: DiskBackend, *objects: tuple[int, bytes]) -> list[StoreOutcome]:
    async def main() -> list[StoreOutcome]:
        return list(await backend.store([key(n) for n, _ in objects], [memoryview(data) for _, data in objects]))

    return asyncio.run(main())


def test_c6_on_a_full_disk_a_store_fails_and_leaves_nothing_behind(disk: Disk, small_disk: Path) -> None:
    backend = disk(small_disk)
    asyncio.run(backend.open())
    with pytest.raises(OSError, match="No space left") as caught:
        store(backend, (0, bytes(1024 * KIB)))
    assert caught.value.errno == errno.ENOSPC
    assert files_under(small_disk) == []
    data = os.urandom(100 * KIB)  # the room is there again
    store(backend, (0, data))
    assert load(backend, 0, len(data)) == (HIT, data)


def test_c6_on_a_full_disk_what_is_there_and_the_rest_of_the_batch_stay_whole(disk: Disk, small_disk: Path) -> None:
    backend = disk(small_disk)
    asyncio.run(backend.open())
    old, small = os.urandom(20 * KIB), os.urandom(10 * KIB)
    store(backend, (0, old))
    with pytest.raises(OSError, match="No space left"):
        store(backend, (2, bytes(1024 * KIB)), (1, small))
    assert load(backend, 0, len(old)) == (HIT, old)
    outcome, got = load(backend, 1, len(small))
    assert outcome is MISS or got == small
    assert all(path.suffix == ".kv" for path in files_under(small_disk))


def test_a_read_only_disk_is_opened_and_read_and_rejects_stores(disk: Disk, small_disk: Path) -> None:
    backend = disk(small_disk)
    asyncio.run(backend.open())
    store(backend, (0, b"before"))
    mount("-o", "remount,ro", small_disk)
    reader = disk(small_disk)
    asyncio.run(reader.open())
    assert load(reader, 0, 6) == (HIT, b"before")
    with pytest.raises(OSError, match="Read-only") as caught:
        store(reader, (1, b"after"))
    assert caught.value.errno == errno.EROFS
    with pytest.raises(OSError, match="Read-only"):
        asyncio.run(reader.delete([key(0)]))
    assert load(reader, 0, 6) == (HIT, b"before")


def test_a_read_only_disk_without_the_folder_cannot_be_opened(disk: Disk, small_disk: Path) -> None:
    backend = disk(small_disk / "objects")
    mount("-o", "remount,ro", small_disk)
    with pytest.raises(OSError, match="Read-only"):
        asyncio.run(backend.open())


def test_a_folder_that_cannot_be_made_is_an_error_at_open(disk: Disk, tmp_path: Path) -> None:
    backend = disk(tmp_path / "objects")
    (tmp_path / "objects").write_text("in the way")
    with pytest.raises(OSError, match="objects"):
        asyncio.run(backend.open())


def test_a_disk_that_cannot_tell_what_is_there_fails(backend: DiskBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: object, **keywords: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "stat", failing)
    with pytest.raises(OSError, match="Input/output error"):
        asyncio.run(backend.contains([key(0)]))
