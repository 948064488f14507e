"""Objects whose files cannot be removed: an eviction passes over them."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from offload_backend_disk import DiskBackend

from offload_core.api.backend import StoreOutcome
from tests.backends.disk.conftest import Disk, key, mount, store, used

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


async def full(disk: Disk, root: Path, policy: str) -> DiskBackend:
    """Return an open tier that is full of the objects 0 to 9."""
    backend = disk(root, capacity=10 * NBYTES, low_watermark=1, eviction=policy)
    await backend.open()
    for number in range(10):
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
