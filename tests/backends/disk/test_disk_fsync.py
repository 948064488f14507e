"""The fsync option forces data to the disk before an object counts as stored."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from pathlib import Path

import pytest

from offload_core.api.backend import StoreOutcome
from tests.backends.disk.conftest import Disk, key, store, used


@pytest.mark.parametrize("options", [{}, {"capacity": "1MiB"}], ids=["without a limit", "with a limit"])
@pytest.mark.parametrize(
    ("fsync", "forced"),
    [
        ("none", []),
        ("data", [("file", 0), ("file", 1)]),
        ("data and folder", [("file", 0), ("folder", 1), ("file", 1), ("folder", 2)]),
    ],
)
def test_files_and_folders_are_forced_to_the_disk_as_the_option_says(
    tmp_path: Path,
    disk: Disk,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, str],
    fsync: str,
    forced: list[tuple[str, int]],
) -> None:
    seen: list[tuple[str, int]] = []

    def watched(descriptor: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        seen.append((kind, len(list(tmp_path.rglob("*.kv")))))

    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, watched)
    backend = disk(tmp_path, fsync=fsync, **options)

    async def main() -> None:
        await backend.open()
        for number in range(2):
            reservation = await backend.prepare_store([key(number)], [1000])
            assert await backend.store([key(number)], [memoryview(bytes(1000))]) == [StoreOutcome.STORED]
            await reservation.release()

    asyncio.run(main())
    assert seen == forced, "forced files and folders, each with the number of visible objects"


def test_an_object_whose_folder_cannot_be_forced_to_the_disk_counts_in_the_capacity(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def failing(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    backend = disk(tmp_path, fsync="data and folder", capacity=1000, low_watermark=1)

    async def main() -> None:
        await backend.open()
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", failing)
            for number in range(5):
                with pytest.raises(OSError, match="Input/output error"):
                    await store(backend, number, bytes(200))
        assert used(tmp_path) == 1000
        assert await store(backend, 5, bytes(200)) is StoreOutcome.STORED
        assert used(tmp_path) == 1000, "the account did not count the objects"

    asyncio.run(main())
