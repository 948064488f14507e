"""The disk backend on a real file system that vanishes and is mounted again, as another device."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from offload_backend_disk import DiskBackend
from offload_backend_disk.folder.processes import STATE_FOLDER

from offload_core.api.backend import LoadOutcome, StoreOutcome
from tests.backends.disk.conftest import Disk, key, store, until
from tests.media.fuse.mount import FaultFs

OPTIONS = pytest.mark.parametrize("options", [{}, {"capacity": "10MiB"}], ids=["without a limit", "with a limit"])


def mount_again(fault_fs: FaultFs) -> None:
    """Let the mount vanish and return, until it is another device, as a mount on another host may be."""
    device = fault_fs.path.stat().st_dev
    fault_fs.abort()
    fault_fs.mount()
    assert fault_fs.path.stat().st_dev != device, "this kernel gives the new mount the old number"


async def is_served(backend: DiskBackend, number: int) -> bool:
    return await backend.load_into([key(number)], [memoryview(bytearray(4))]) == [LoadOutcome.HIT]


async def until_stored(backend: DiskBackend, number: int) -> None:
    while await store(backend, number) is StoreOutcome.REJECTED:  # noqa: ASYNC110 - until the folder has been scanned
        await asyncio.sleep(0.01)


@OPTIONS
def test_all_users_of_a_folder_know_it_again_after_one_of_them_took_the_others_for_dead(
    fault_fs: FaultFs, disk: Disk, options: dict[str, str]
) -> None:
    root = fault_fs.path / "objects"
    first, second, late = (disk(root, **options) for _ in range(3))
    lock_files = fault_fs.backing / "objects" / STATE_FOLDER / "owners"

    async def main() -> None:
        for backend in (first, second):
            await backend.open()
            await store(backend, 0)
        lock_file = lock_files / second._processes.own_name
        inode = lock_file.stat().st_ino
        mount_again(fault_fs)
        await late.open()
        await store(late, 1)
        await until(lambda: not lock_file.exists() or lock_file.stat().st_ino != inode)
        for number, backend in enumerate((first, second), start=2):
            assert await is_served(backend, 0)
            await until_stored(backend, number)
        assert lock_file.exists(), "a process locks its file again"
        for backend in (first, second, late):
            await backend.close()

    asyncio.run(main())


@OPTIONS
def test_another_folder_at_the_same_place_is_refused(
    fault_fs: FaultFs, disk: Disk, tmp_path: Path, options: dict[str, str]
) -> None:
    root = fault_fs.path / "objects"
    backend = disk(root, **options)

    async def main() -> None:
        await backend.open()
        await store(backend, 0)
        (fault_fs.backing / "objects").rename(tmp_path / "away")
        other = disk(fault_fs.backing / "objects", **options)
        await other.open()
        await store(other, 0)
        await other.close()
        mount_again(fault_fs)
        with pytest.raises(OSError, match="is on another file system"):
            await is_served(backend, 2)  # an absent object: there may be one in the folder that is gone
        with pytest.raises(OSError, match="is on another file system"):
            await store(backend, 1)

    asyncio.run(main())
