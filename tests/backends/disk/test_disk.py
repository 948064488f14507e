"""Behaviour of the disk backend beyond the contract, on a file system without faults."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from offload_backend_disk import DiskBackend
from offload_backend_disk.folder.processes import STATE_FOLDER

from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.api.keys import ObjectKey
from tests.backends.disk.conftest import Disk, files_under, key

MISS = LoadOutcome.MISS
STORED = StoreOutcome.STORED


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


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
    own = tmp_path / "objects" / STATE_FOLDER
    made = [path for path in [own.parent, *own.parent.rglob("*")] if own not in [path, *path.parents]]
    assert len(made) == 5
    for path in made:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600 & ~mask), path


def test_a_folder_that_exists_keeps_its_mode(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o750)
    asyncio.run(disk(tmp_path / "shared").open())
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o750


def test_objects_removed_at_run_time_are_stored_again(backend: DiskBackend, tmp_path: Path) -> None:
    async def main() -> None:
        await backend.open()
        await backend.store([key(0)], [memoryview(b"data")])
        for folder in (tmp_path / "objects").iterdir():
            shutil.rmtree(folder)
        assert await backend.contains([key(0)]) == [False]
        assert await backend.load_into([key(0)], [memoryview(bytearray(4))]) == [MISS]
        assert await backend.store([key(0)], [memoryview(b"data")]) == [STORED]
        assert await backend.contains([key(0)]) == [True]

    asyncio.run(main())


def test_an_import_makes_no_database() -> None:
    script = (
        "import sys\nsys.addaudithook(lambda event, _: event == 'sqlite3.connect' and sys.exit('a database'))\n"
        "import offload_backend_disk.plugin"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_medium_is_persistent_and_shared(backend: DiskBackend) -> None:
    capabilities = backend.capabilities
    assert (capabilities.medium, capabilities.persistent, capabilities.shared) == ("disk", True, True)


def test_a_listing_ignores_foreign_files(backend: DiskBackend, tmp_path: Path) -> None:
    async def main() -> list[ObjectKey]:
        await backend.open()
        await backend.store([key(0xC5)], [memoryview(b"data")])
        folder = tmp_path / "objects" / ("ab" * 32) / "full-u256" / "c5"
        (folder / f".{'c5' * 32}.kv.1-0123456789abcdef.tmp").write_bytes(b"half")
        (folder / f"{'c6' * 32}.kv").write_bytes(b"in the wrong folder")
        (folder / f"{'c5' * 31}.kv").mkdir()
        (tmp_path / "objects" / "lost+found").mkdir()
        (tmp_path / "objects" / "notes.txt").write_text("keep")
        return [found.key async for batch in backend.list_objects() for found in batch]

    assert asyncio.run(main()) == [key(0xC5)]
