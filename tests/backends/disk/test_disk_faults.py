"""The disk backend on file systems that are full, read-only or missing."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest
from offload_backend_disk import DiskBackend
from offload_backend_disk.folder import files

from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.testing.rig.recording_check import RecordingCheck
from tests.backends.disk.conftest import Disk, files_under, key, mount
from tests.backends.disk.conftest import store as store_one

HIT, CORRUPT = LoadOutcome.HIT, LoadOutcome.CORRUPT
STORED, REJECTED = StoreOutcome.STORED, StoreOutcome.REJECTED
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


def test_c6_on_a_full_disk_a_store_is_rejected_and_leaves_nothing_behind(small_disk: Path, disk: Disk) -> None:
    backend = disk(small_disk)
    asyncio.run(backend.open())
    assert store(backend, (0, bytes(1024 * KIB))) == [REJECTED]
    assert files_under(small_disk) == []
    data = os.urandom(100 * KIB)  # the space is free again
    store(backend, (0, data))
    assert load(backend, 0, len(data)) == (HIT, data)


def test_c6_on_a_full_disk_stored_objects_and_the_rest_of_the_batch_stay_whole(disk: Disk, small_disk: Path) -> None:
    backend = disk(small_disk)
    asyncio.run(backend.open())
    old, small = os.urandom(20 * KIB), os.urandom(10 * KIB)
    store(backend, (0, old))
    assert store(backend, (2, bytes(1024 * KIB)), (1, small)) == [REJECTED, STORED]
    assert load(backend, 0, len(old)) == (HIT, old)
    assert load(backend, 1, len(small)) == (HIT, small)
    assert all(path.suffix == ".kv" for path in files_under(small_disk))


def test_a_read_only_disk_is_opened_and_read_and_rejects_stores(small_disk: Path, disk: Disk) -> None:
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


def test_a_read_only_disk_without_the_folder_cannot_be_opened(small_disk: Path, disk: Disk) -> None:
    backend = disk(small_disk / "objects")
    mount("-o", "remount,ro", small_disk)
    with pytest.raises(OSError, match="Read-only"):
        asyncio.run(backend.open())


def test_a_folder_that_cannot_be_created_is_an_error_at_open(disk: Disk, tmp_path: Path) -> None:
    backend = disk(tmp_path / "objects")
    (tmp_path / "objects").write_text("in the way")
    with pytest.raises(OSError, match="objects"):
        asyncio.run(backend.open())


@pytest.mark.parametrize("options", [{}, {"capacity": "10MiB"}], ids=["without a limit", "with a limit"])
def test_a_full_quota_rejects_stores_until_space_is_free(
    disk: Disk,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, str],
) -> None:
    backend = disk(tmp_path, **options)
    write = files.write

    def over_quota(name: str, temporary: str, *arguments: object, **keywords: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), temporary)

    async def main() -> None:
        await backend.open()
        await backend.store([key(0)], [memoryview(b"before")])
        monkeypatch.setattr(files, "write", over_quota)
        for _ in range(2):
            outcomes = await backend.store([key(1), key(0), key(2)], [memoryview(b"object")] * 3)
            assert outcomes[::2] == [REJECTED, REJECTED]
        assert len(caplog.records) == 1, "logged once"
        assert await backend.load_into([key(0)], [memoryview(bytearray(6))]) == [HIT]
        monkeypatch.setattr(files, "write", write)
        assert await backend.store([key(1)], [memoryview(b"object")]) == [STORED]

    asyncio.run(main())


def test_a_disk_that_is_full_at_the_start_is_used_when_space_is_free(
    small_disk: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload_backend_disk.housekeeping._CHECK_SECONDS", 1.0)  # of ten
    filler = small_disk / "filler"
    filler.write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096))
    backend = disk(small_disk, capacity="200KiB")

    async def put() -> StoreOutcome:
        reservation = await backend.prepare_store([key(0)], [100])
        outcome = reservation.outcomes[0] or (await backend.store([key(0)], [memoryview(bytes(100))]))[0]
        await reservation.release()
        return outcome

    async def main() -> None:
        await backend.open()
        assert await put() is REJECTED
        filler.unlink()
        while await put() is not STORED:  # noqa: ASYNC110 - retried after a second
            await asyncio.sleep(0.05)

    asyncio.run(main())


def test_a_lookup_on_a_failing_disk_is_an_error(backend: DiskBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: object, **keywords: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "lstat", failing)
    with pytest.raises(OSError, match="Input/output error"):
        asyncio.run(backend.contains([key(0)]))


@pytest.mark.parametrize("checked", [False, True], ids=["loads", "checked loads"])
@pytest.mark.parametrize("options", [{}, {"capacity": "10MiB"}], ids=["without a limit", "with a limit"])
def test_an_object_on_a_bad_sector_is_corrupt_and_several_are_an_error(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], checked: bool
) -> None:
    backend = disk(tmp_path, **options)
    preadv = os.preadv
    bad: set[int] = set()

    def failing(descriptor: int, *arguments: Any) -> int:
        if os.fstat(descriptor).st_ino in bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, *arguments)

    def damage(number: int) -> None:
        bad.add(backend._folder.layout.path(key(number)).stat().st_ino)

    async def load(*numbers: int) -> list[LoadOutcome]:
        keys, buffers = [key(number) for number in numbers], [memoryview(bytearray(9)) for _ in numbers]
        if checked:
            return list(await backend.load_and_check(keys, buffers, [RecordingCheck(buffer) for buffer in buffers]))
        return list(await backend.load_into(keys, buffers))

    async def main() -> None:
        await backend.open()
        for number in range(4):
            await store_one(backend, number, b"an object")
        monkeypatch.setattr(os, "preadv", failing)
        damage(1)
        with pytest.raises(OSError, match="Input/output error"):
            await load(1)  # nothing shows that the disk can read any other file
        assert await load(0, 1, 2) == [HIT, CORRUPT, HIT]
        assert await load(1) == [CORRUPT], "the core reads a damaged object once more before it deletes it"
        await backend.delete([key(1)])
        assert await store_one(backend, 1, b"an object") is STORED
        damage(1)
        with pytest.raises(OSError, match="Input/output error"):
            await load(1)  # the file is another one
        damage(0)
        damage(2)
        with pytest.raises(OSError, match="Input/output error"):
            await load(0, 2, 3)

    asyncio.run(main())
