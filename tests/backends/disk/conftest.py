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

from offload_core.api.backend import BackendContext
from offload_core.api.keys import ObjectKey
from offload_core.runtime.threads import DaemonExecutor

Disk = Callable[..., DiskBackend]


def key(number: int, pack: str = "full-u256") -> ObjectKey:
    return ObjectKey("ab" * 32, pack, bytes([number]) * 32)


def files_under(folder: Path) -> list[Path]:
    """All files but those of the account."""
    return sorted(path for path in folder.rglob("*") if STATE_FOLDER not in path.parts and not path.is_dir())


def used(folder: Path) -> int:
    """Bytes of all objects in a folder, and of those that are being written."""
    sizes = []
    for path in files_under(folder):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:
            continue
    return sum(sizes)


def open_account(root: Path, capacity_bytes: int, owner: str = "owner", **options: Any) -> Account:
    account = Account(
        MountGuard(root), Processes(root, owner), Limits(capacity_bytes, **{"low_watermark": 1.0, **options})
    )
    account.open()
    return account


def settled(folder: Path, capacity_bytes: int) -> tuple[int, list[Path]]:
    """Open the folder as the next process does; returns its account's bytes, and what is no object."""
    account = open_account(folder, capacity_bytes, "next")
    account.release_dead_reservations()
    scan = Scan(Layout(folder), Processes(folder, "next"), account)
    if scan.is_needed():
        for _ in scan.steps():
            pass
    total = account.used_bytes
    account.close()
    assert list((folder / STATE_FOLDER / "owners").iterdir()) == [], "what the dead had locked is still there"
    return total, [path for path in files_under(folder) if path.suffix != ".kv"]


@pytest.fixture
def disk() -> Iterator[Disk]:
    """Make disk backends with two threads each; they are closed in the end."""
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
        pytest.skip(f"this machine does not let us mount: {done.stderr.strip()}")


@contextmanager
def tmpfs(size: str) -> Iterator[Path]:
    """A real file system of its own. It can be remounted."""
    # Not in tmp_path: what a killed test run leaves mounted there would make every later run fail when it cleans up.
    folder = Path(tempfile.mkdtemp(prefix="offload-small-disk-"))
    try:
        mount("-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", folder)
        try:
            yield folder
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)  # a test that fails has files open there
    finally:
        folder.rmdir()


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 256 KiB. Ask for it before ``disk``, so that what is on it is closed before it goes."""
    with tmpfs("256k") as folder:
        yield folder
