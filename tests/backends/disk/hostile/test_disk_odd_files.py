"""Odd things in the place of objects and of their folders: each is one miss or one rejected store, and no more."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from offload_backend_disk import DiskBackend
from offload_backend_disk.folder.layout import Layout

from offload_core.api.backend import LoadOutcome, StoreOutcome
from tests.backends.disk.conftest import Disk, key

HIT, MISS, CORRUPT = LoadOutcome.HIT, LoadOutcome.MISS, LoadOutcome.CORRUPT
REJECTED, STORED = StoreOutcome.REJECTED, StoreOutcome.STORED
NBYTES = 20_000
TEN_GIB = 10 << 30
LIMITS = pytest.mark.parametrize("options", [{}, {"capacity": "1GiB"}], ids=["without a limit", "with a limit"])


def folder_with_files(path: Path) -> None:
    path.mkdir()
    for number in range(100):
        (path / str(number)).touch()


def file_for_folder(path: Path) -> None:
    path.parent.rmdir()
    path.parent.touch()


ODD: dict[str, Callable[[Path], None]] = {
    "fifo": os.mkfifo,
    "empty folder": Path.mkdir,
    "folder": folder_with_files,
    "link to itself": lambda path: path.symlink_to(path),
    "link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "link to nothing": lambda path: path.symlink_to("/etc/nonexistent"),
    "link to a file": lambda path: path.symlink_to("/etc/passwd"),
    "socket": lambda path: os.mknod(path, 0o140600),
    "file in place of its folder": file_for_folder,
}
REPLACED = {"fifo", "link to itself", "link to /dev/zero", "link to nothing", "link to a file", "socket"}


async def offer(backend: DiskBackend, *numbers: int) -> list[StoreOutcome]:
    keys = [key(number) for number in numbers]
    reservation = await backend.prepare_store(keys, [NBYTES] * len(keys))
    missing = [one for one, outcome in zip(keys, reservation.outcomes, strict=True) if outcome is None]
    outcomes = iter(await backend.store(missing, [memoryview(bytes(NBYTES))] * len(missing)))
    await reservation.release()
    return [outcome or next(outcomes) for outcome in reservation.outcomes]


@LIMITS
@pytest.mark.parametrize("kind", ODD)
def test_an_odd_thing_is_a_miss_and_the_others_of_its_batch_succeed(
    disk: Disk, tmp_path: Path, kind: str, options: dict[str, str]
) -> None:
    path = Layout(tmp_path).path(key(0))

    async def main() -> None:
        backend = disk(tmp_path, **options)
        await backend.open()
        path.parent.mkdir(parents=True, mode=0o700)
        ODD[kind](path)
        keys = [key(0), key(1)]
        assert await offer(backend, 1) == [STORED]
        assert await backend.contains(keys) == [False, True]
        held = await backend.prepare_load(keys)
        assert held.present == (False, True)
        await held.release()
        buffers = [memoryview(bytearray(NBYTES)) for _ in keys]
        assert await backend.load_into(keys, buffers) == [MISS, HIT]
        for number in range(2, 5):
            first, other = await offer(backend, 0, number)
            assert other is STORED
            assert (first is REJECTED) == (kind not in REPLACED), first
        await backend.delete([key(0)])
        assert await backend.contains([key(0)]) == [False]
        await backend.close()

    asyncio.run(asyncio.wait_for(main(), 20))


@LIMITS
def test_a_file_of_ten_gib_is_corrupt_and_takes_no_memory(disk: Disk, tmp_path: Path, options: dict[str, str]) -> None:
    path = Layout(tmp_path).path(key(0))
    path.parent.mkdir(parents=True, mode=0o700)
    with path.open("wb") as file:
        file.truncate(TEN_GIB)

    async def main() -> None:
        backend = disk(tmp_path, **options)
        await backend.open()
        assert await backend.load_into([key(0)], [memoryview(bytearray(NBYTES))]) == [CORRUPT]
        await backend.delete([key(0)])
        await backend.close()

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    asyncio.run(asyncio.wait_for(main(), 20))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024
    assert not path.exists()


UNREADABLE = """
import asyncio, os, sys
from pathlib import Path
from offload_backend_disk import DiskBackend, DiskOptions
from offload_backend_disk.folder.layout import Layout
from offload_core.api.backend import BackendContext
from offload_core.runtime.threads import DaemonExecutor
from tests.backends.disk.conftest import key

root = Path(sys.argv[1])

async def main():
    options = DiskOptions(path=root, **({"capacity": "10MiB"} if sys.argv[2] == "bounded" else {}))
    backend = DiskBackend(options, BackendContext("disk", DaemonExecutor(2, "disk")))
    await backend.open()
    keys = [key(0), key(1), key(2)]
    await backend.store(keys, [memoryview(b"data")] * 3)
    Layout(root).path(key(0)).chmod(0)
    Layout(root).path(key(1)).parent.chmod(0)
    print([o.name for o in await backend.load_into(keys, [memoryview(bytearray(4)) for _ in keys])])
    print(await backend.contains(keys[1:]))
    print([o.name for o in await backend.store([key(1), key(3)], [memoryview(b"data")] * 2)])
    root.chmod(0)
    for call in (backend.load_into(keys[:1], [memoryview(bytearray(4))]), backend.contains(keys)):
        try:
            await call
        except PermissionError:
            print("error")
    root.chmod(0o700)
    Layout(root).path(key(1)).parent.chmod(0o700)
    await backend.close()

asyncio.run(main())
"""


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that other users reach, even while another test run makes its own temporary folders private."""
    with tempfile.TemporaryDirectory(prefix="offload-reachable-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change to another user")
@pytest.mark.parametrize("limit", ["unbounded", "bounded"])
def test_an_unreadable_object_is_a_miss_and_an_unreadable_folder_is_an_error(reachable: Path, limit: str) -> None:
    root = reachable / "kv"
    root.mkdir()
    os.chown(root, 65534, 65534)
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"]
    done = subprocess.run(
        [*command, sys.executable, "-c", UNREADABLE, str(root), limit], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == [
        "['MISS', 'MISS', 'HIT']",
        "[False, True]",
        "['REJECTED', 'STORED']",
        *["error", "error"],
    ], done.stderr


FOREIGN_FOLDERS = """
import asyncio, logging, sys
from pathlib import Path
from offload_backend_disk import DiskBackend, DiskOptions
from offload_core.api.backend import BackendContext, StoreOutcome
from offload_core.runtime.threads import DaemonExecutor
from tests.backends.disk.conftest import key, store

async def main():
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    options = DiskOptions(path=Path(sys.argv[1]), capacity="10MiB")
    backend = DiskBackend(options, BackendContext("disk", DaemonExecutor(2, "disk")))
    await backend.open()
    while await store(backend, 1) is not StoreOutcome.STORED:  # until the scan has ended
        await asyncio.sleep(0.01)
    print([one.key == key(1) async for batch in backend.list_objects() for one in batch])
    await backend.close()

asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change to another user")
def test_folders_that_the_tier_may_not_read_count_as_empty(reachable: Path) -> None:
    root = reachable / "kv"
    foreign = [root / ("cd" * 32), root / ("ab" * 32) / "full-u256" / "00"]
    for folder in foreign:
        folder.mkdir(parents=True)
        (folder / "object").touch()
    for folder in (root, root / ("ab" * 32), root / ("ab" * 32) / "full-u256"):
        os.chown(folder, 65534, 65534)
        folder.chmod(0o700)
    for folder in foreign:
        folder.chmod(0o700)
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"]
    done = subprocess.run(
        [*command, sys.executable, "-c", FOREIGN_FOLDERS, str(root)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *warnings, listed = done.stdout.splitlines()
    assert listed == "[True]"
    for folder in foreign:
        assert sum(f"{folder} may not be read by this process" in warning for warning in warnings) == 1, warnings
