"""Objects whose files cannot be removed: an eviction passes over them."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from offload_backend_disk import DiskBackend

from offload_core.api.backend import StoreOutcome
from tests.backends.disk.conftest import Disk, key, mount, store, used
from tests.media.fuse.mount import FaultFs

STORED, REJECTED = StoreOutcome.STORED, StoreOutcome.REJECTED
NBYTES = 10 * 1024
POLICIES = pytest.mark.parametrize("policy", ["lru", "slru"])


@contextmanager
def unremovable(backend: DiskBackend, *numbers: int) -> Iterator[None]:
    """Make objects' files mount points: the kernel answers a removal by EBUSY."""
    with ExitStack() as stack:
        for number in numbers:
            path = backend._folder.layout.path(key(number))
            mount("--bind", path, path)
            stack.callback(subprocess.run, ["umount", str(path)], check=True)
        yield


async def full(disk: Disk, root: Path, policy: str = "lru", count: int = 10) -> DiskBackend:
    """Return an open tier that is full of the objects from 0 on."""
    backend = disk(root, capacity=count * NBYTES, low_watermark=1, eviction=policy)
    await backend.open()
    for number in range(count):
        assert await store(backend, number, bytes(NBYTES)) is STORED
    return backend


@POLICIES
def test_an_object_that_cannot_be_removed_is_passed_over_and_logged_once(
    disk: Disk, tmp_path: Path, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        backend = await full(disk, tmp_path, policy)
        with unremovable(backend, 0, 2):
            for number in range(10, 40):
                assert await store(backend, number, bytes(NBYTES)) is STORED
            assert list(await backend.contains([key(number) for number in (0, 1, 2, 3)])) == [True, False, True, False]
        assert used(tmp_path) == 10 * NBYTES
        for number in range(40, 60):  # the objects are evicted as soon as that is possible
            assert await store(backend, number, bytes(NBYTES)) is STORED
        assert list(await backend.contains([key(0), key(2)])) == [False, False]
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "cannot be evicted" in caplog.text

    asyncio.run(main())


@POLICIES
def test_if_no_object_can_be_removed_stores_are_rejected(disk: Disk, tmp_path: Path, policy: str) -> None:
    async def main() -> None:
        backend = await full(disk, tmp_path, policy)
        with unremovable(backend, *range(10)):
            for number in (10, 11):
                assert await store(backend, number, bytes(NBYTES)) is REJECTED
        assert await store(backend, 10, bytes(NBYTES)) is STORED
        assert used(tmp_path) == 10 * NBYTES

    asyncio.run(main())


@POLICIES
@pytest.mark.parametrize("number", [errno.EIO, errno.EUCLEAN], ids=errno.errorcode.get)
def test_if_the_disk_fails_to_remove_any_object_stores_are_errors(
    fault_fs: FaultFs, disk: Disk, policy: str, number: int
) -> None:
    async def main() -> None:
        root = fault_fs.path / "objects"
        backend = await full(disk, root, policy)
        with fault_fs.fault("unlink", "*.kv", "error", number=number):
            for _ in range(2):
                with pytest.raises(OSError, match=re.escape(os.strerror(number))):
                    await store(backend, 10, bytes(NBYTES))
        assert await store(backend, 10, bytes(NBYTES)) is STORED
        assert used(root) == 10 * NBYTES
        await backend.close()

    asyncio.run(main())


@pytest.mark.parametrize("limits", [{"capacity": 5 * NBYTES}, {"capacity": 12 * NBYTES, "high_watermark": 0.5}])
def test_if_the_disk_fails_in_a_step_of_an_eviction_stores_are_errors(
    fault_fs: FaultFs, disk: Disk, monkeypatch: pytest.MonkeyPatch, limits: dict[str, float]
) -> None:
    monkeypatch.setattr("offload_backend_disk.capacity.eviction._MOST_PER_STEP", 4)  # of 256

    async def main() -> None:
        root = fault_fs.path / "objects"
        await (await full(disk, root)).close()
        backend = disk(root, low_watermark=0.4, **limits)
        await backend.open()
        with (
            fault_fs.fault("unlink", "*.kv", "error"),
            pytest.raises(OSError, match="Input/output error"),
        ):
            await store(backend, 10, bytes(NBYTES))
        await backend.close()

    asyncio.run(main())


def test_a_disk_that_fails_to_remove_some_objects_only_evicts_others(fault_fs: FaultFs, disk: Disk) -> None:
    async def main() -> None:
        backend = await full(disk, fault_fs.path / "objects")
        with fault_fs.fault("unlink", "*/0[0-4]*.kv", "error"):
            assert await store(backend, 10, bytes(NBYTES)) is STORED
        assert list(await backend.contains([key(4), key(5)])) == [True, False]
        await backend.close()

    asyncio.run(main())


def test_more_unremovable_objects_than_one_store_tries_are_passed_over_by_the_next(
    fault_fs: FaultFs, disk: Disk
) -> None:
    async def main() -> None:
        backend = await full(disk, fault_fs.path / "objects", count=90)
        with fault_fs.fault("unlink", "*/[0-4]?/*.kv", "error", number=errno.EPERM):  # 80 objects
            assert [await store(backend, number, bytes(NBYTES)) for number in (90, 91)] == [REJECTED, STORED]
        await backend.close()

    asyncio.run(main())
