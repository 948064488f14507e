"""A disk backend in a temporary folder, and real small file systems."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from offload_backend_disk import DiskBackend, DiskOptions
from offload_backend_disk.capacity.account import Account
from offload_backend_disk.capacity.eviction import Limits
from offload_backend_disk.folder.layout import Layout
from offload_backend_disk.folder.mount_guard import MountGuard
from offload_backend_disk.folder.processes import STATE_FOLDER, Processes
from offload_backend_disk.scan import Scan

from offload_core.api.backend import BackendContext, StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.runtime.threads import DaemonExecutor
from tests.media.fuse.fixtures import _session_fault_fs as _session_fault_fs
from tests.media.fuse.fixtures import fault_fs as fault_fs
from tests.support.tier_log import LOG

Disk = Callable[..., DiskBackend]


def key(number: int, pack: str = "full-u256") -> ObjectKey:
    return ObjectKey("ab" * 32, pack, bytes([number]) * 32)


async def store(backend: DiskBackend, number: int = 0, data: bytes = b"data") -> StoreOutcome:
    """Store an object as the core does: with a reservation."""
    reservation = await backend.prepare_store([key(number)], [len(data)])
    try:
        return reservation.outcomes[0] or (await backend.store([key(number)], [memoryview(data)]))[0]
    finally:
        await reservation.release()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for background work; otherwise the test's time limit ends it."""
    while not condition():  # noqa: ASYNC110 - the work signals no end
        await asyncio.sleep(0.01)


def files_under(folder: Path) -> list[Path]:
    """Return all files except those of the state folder."""
    return sorted(path for path in folder.rglob("*") if STATE_FOLDER not in path.parts and not path.is_dir())


def used(folder: Path) -> int:
    """Return the bytes of all objects and unfinished files in a folder."""
    sizes = []
    for path in files_under(folder):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:
            continue
    return sum(sizes)


def open_account(root: Path, capacity_bytes: int, process: str = "process", **options: Any) -> Account:
    account = Account(
        MountGuard(root),
        Processes(root, process, LOG),
        Limits(capacity_bytes, **{"low_watermark": 1.0, **options}),
        LOG,
    )
    account.open()
    return account


def recover(folder: Path, capacity_bytes: int) -> tuple[int, list[Path]]:
    """Open the folder as the next process does; return the bytes in its account, and the files that are no objects."""
    account = open_account(folder, capacity_bytes, "next")
    account.release_dead_reservations()
    scan = Scan(Layout(folder), Processes(folder, "next", LOG), account, LOG)
    if scan.is_needed():
        for _ in scan.steps():
            pass
    total = account.used_bytes
    account.close()
    assert list((folder / STATE_FOLDER / "owners").iterdir()) == [], "lock files of dead processes remain"
    assert list((folder / STATE_FOLDER).glob("starting-*")) == [], "unfinished lock files remain"
    return total, [path for path in files_under(folder) if path.suffix != ".kv"]


@pytest.fixture
def disk() -> Iterator[Disk]:
    """Make disk backends with two threads each; the fixture closes them."""
    made: list[tuple[DaemonExecutor, DiskBackend]] = []

    def make(path: Path, **options: Any) -> DiskBackend:
        executor = DaemonExecutor(2, f"disk-{len(made)}")
        checked = DiskOptions.model_validate({"path": path, **options})
        made.append((executor, DiskBackend(checked, BackendContext("disk", executor))))
        return made[-1][1]

    yield make
    for executor, backend in made:
        asyncio.run(backend.close())
        executor.shutdown()


@pytest.fixture
def backend(disk: Disk, tmp_path: Path) -> DiskBackend:
    return disk(tmp_path / "objects")


def mount(*arguments: str | Path) -> None:
    done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this machine does not permit a mount: {done.stderr.strip()}")


@contextmanager
def tmpfs(size: str) -> Iterator[Path]:
    """A real file system of its own. It can be remounted."""
    # Not in tmp_path: after a killed test run, a mount left there would make the cleanup of every later run fail.
    folder = Path(tempfile.mkdtemp(prefix="offload-small-disk-"))
    try:
        mount("-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", folder)
        try:
            yield folder
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)  # a failed test has files open there
    finally:
        folder.rmdir()


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 256 KiB. Request it before ``disk``: backends on it must close before it is unmounted."""
    with tmpfs("256k") as folder:
        yield folder
