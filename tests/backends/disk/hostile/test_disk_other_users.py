"""Other users of the machine: folders that they control, links that they plant, files that they must not open."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from offload_backend_disk import DiskBackend
from offload_backend_disk.folder.processes import STATE_FOLDER

from offload_core.api.backend import LoadOutcome, StoreOutcome
from tests.backends.disk.conftest import Disk, key, store
from tests.backends.disk.test_disk import umask

NOBODY = 65534
LIMITS = pytest.mark.parametrize("options", [{}, {"capacity": "10MiB"}], ids=["without a limit", "with a limit"])
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


async def use(backend: DiskBackend) -> StoreOutcome:
    await backend.open()
    try:
        return await store(backend)
    finally:
        await backend.close()


@needs_root
@LIMITS
def test_the_folder_of_another_user_is_refused(disk: Disk, tmp_path: Path, options: dict[str, str]) -> None:
    root = tmp_path / "kv"
    root.mkdir(mode=0o755)
    os.chown(root, NOBODY, NOBODY)
    with pytest.raises(PermissionError, match=r"uid 65534.*must be root.*chown") as caught:
        asyncio.run(use(disk(root, **options)))
    assert str(root) in str(caught.value)
    assert list(root.iterdir()) == []


@LIMITS
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o2775, 0o1777, 0o702], ids=oct)
def test_a_folder_that_others_may_write_to_is_refused(
    disk: Disk, tmp_path: Path, mode: int, options: dict[str, str]
) -> None:
    root = tmp_path / "kv"
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(PermissionError, match=rf"mode {mode:04o}.*such as 0700.*chmod go-w") as caught:
        asyncio.run(use(disk(root, **options)))
    assert str(root) in str(caught.value)
    assert list(root.iterdir()) == []


@LIMITS
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o2750], ids=oct)
def test_a_folder_below_a_sticky_one_and_a_link_to_it_are_good(
    disk: Disk, tmp_path: Path, mode: int, options: dict[str, str]
) -> None:
    (tmp_path / "sticky").mkdir()
    (tmp_path / "sticky").chmod(0o1777)
    root = tmp_path / "sticky" / "kv"
    root.mkdir()
    root.chmod(mode)
    (tmp_path / "link").symlink_to(root)
    for folder in (root, tmp_path / "link"):
        assert asyncio.run(use(disk(folder, **options))) in (StoreOutcome.STORED, StoreOutcome.ALREADY_PRESENT)


@needs_root
@LIMITS
@pytest.mark.parametrize("name", [STATE_FOLDER, f"{STATE_FOLDER}/owners"])
def test_a_state_folder_of_another_user_is_refused(
    disk: Disk, tmp_path: Path, name: str, options: dict[str, str]
) -> None:
    (tmp_path / name).mkdir(parents=True)
    os.chown(tmp_path / name, NOBODY, NOBODY)
    with pytest.raises(PermissionError, match=r"uid 65534") as caught:
        asyncio.run(use(disk(tmp_path, **options)))
    assert name in str(caught.value)


@LIMITS
def test_a_linked_state_folder_is_refused(disk: Disk, tmp_path: Path, options: dict[str, str]) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / STATE_FOLDER).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match=STATE_FOLDER):
        asyncio.run(use(disk(tmp_path / "kv", **options)))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def fifo(path: Path, victim: Path) -> None:
    os.mkfifo(path)


def folder(path: Path, victim: Path) -> None:
    (path / "inner").mkdir(parents=True)


def foreign(path: Path, victim: Path) -> None:
    path.write_bytes(b"planted")
    os.chown(path, NOBODY, NOBODY)


@needs_root
@pytest.mark.parametrize("name", ["opening", "scanning", "pins", "account.sqlite", "account.sqlite-wal"])
@pytest.mark.parametrize("plant", [link, fifo, folder, foreign])
def test_a_planted_control_file_is_set_aside_and_never_followed(
    disk: Disk, tmp_path: Path, name: str, plant: Callable[[Path, Path], None]
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious content")
    victim.chmod(0o600)
    state = tmp_path / "kv" / STATE_FOLDER
    state.mkdir(parents=True)
    state.chmod(0o777)
    plant(state / name, victim)
    assert asyncio.run(asyncio.wait_for(use(disk(tmp_path / "kv", capacity="10MiB")), 10)) is StoreOutcome.STORED
    assert victim.read_text() == "precious content"
    assert stat.S_IMODE(victim.stat().st_mode) == 0o600
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    if (state / name).exists():  # SQLite has removed its own
        status = os.lstat(state / name)
        assert stat.S_ISREG(status.st_mode)
        assert status.st_uid == os.geteuid()


def modes_below(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): oct(stat.S_IMODE(os.lstat(path).st_mode)) for path in folder.rglob("*")}


@pytest.mark.parametrize("mask", [0, 0o022, 0o077], ids=oct)
@pytest.mark.parametrize("root_mode", [None, 0o755, 0o2755], ids=["new", "0755", "setgid"])
def test_everything_is_private_from_the_first_byte(
    disk: Disk, tmp_path: Path, mask: int, root_mode: int | None
) -> None:
    root = tmp_path / "kv"
    if root_mode is not None:
        root.mkdir()
        root.chmod(root_mode)

    async def main() -> dict[str, str]:
        backend = disk(root, capacity="10MiB", direct_io="auto")
        await backend.open()
        assert await store(backend) is StoreOutcome.STORED
        seen = modes_below(root)
        await backend.close()
        return seen

    with umask(mask):
        seen = asyncio.run(main())
    assert {f"{STATE_FOLDER}/account.sqlite{end}" for end in ("", "-wal", "-shm")} <= seen.keys()
    for name, mode in seen.items():
        is_folder = (root / name).is_dir()
        assert mode[-3:] == ("700" if is_folder else "600"), (name, mode)


def test_files_of_an_older_version_become_private(disk: Disk, tmp_path: Path) -> None:
    async def main() -> None:
        first, second = disk(tmp_path, capacity="10MiB"), disk(tmp_path, capacity="10MiB")
        await first.open()
        state = tmp_path / STATE_FOLDER
        for path in [state, *state.iterdir()]:
            path.chmod(0o777 if path.is_dir() else 0o644)
        await second.open()
        (tmp_path / STATE_FOLDER / "scanning").unlink(missing_ok=True)
        assert {mode[-2:] for mode in modes_below(tmp_path).values()} == {"00"}
        await first.close()
        await second.close()

    asyncio.run(main())


@needs_root
def test_another_user_cannot_open_a_control_file(disk: Disk, tmp_path: Path) -> None:
    root = tmp_path / "kv"
    root.mkdir()
    attempt = (
        "import os, sys\n"
        "for name in ['', '/opening', '/pins', '/account.sqlite', '/account.sqlite-wal', '/account.sqlite-shm']:\n"
        "    try:\n"
        "        os.open(sys.argv[1] + name, os.O_RDONLY)\n"
        "        print('opened', name)\n"
        "    except PermissionError:\n"
        "        pass\n"
    )

    async def main() -> str:
        backend = disk(root, capacity="10MiB")
        with umask(0):
            await backend.open()
        for place in (root, *root.parents):  # the way there is free
            place.chmod(place.stat().st_mode | 0o055)
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        command += [sys.executable, "-c", attempt, str(root / STATE_FOLDER)]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
        await backend.close()
        return str(done.stdout)

    assert asyncio.run(main()) == ""


@LIMITS
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_link_to_a_folder_is_followed(disk: Disk, tmp_path: Path, depth: int, options: dict[str, str]) -> None:
    elsewhere = tmp_path / "elsewhere"
    parts = ("ab" * 32, "full-u256", "00")

    async def main() -> None:
        there = disk(elsewhere)
        await there.open()
        assert await there.store([key(0)], [memoryview(b"data")]) == [StoreOutcome.STORED]
        await there.close()
        planted = (tmp_path / "kv").joinpath(*parts[:depth])
        planted.parent.mkdir(parents=True, mode=0o700)
        planted.symlink_to(elsewhere.joinpath(*parts[:depth]))
        backend = disk(tmp_path / "kv", **options)
        await backend.open()
        assert await backend.contains([key(0)]) == [False]
        assert await backend.load_into([key(0)], [memoryview(bytearray(4))]) == [LoadOutcome.MISS]
        assert await store(backend) is StoreOutcome.REJECTED
        await backend.close()

    asyncio.run(main())
    assert len([path for path in elsewhere.rglob("*") if path.suffix in (".kv", ".tmp")]) == 1


def test_disk_and_nfs_refuse_the_folder_of_each_other(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / ".offload-core-share").touch()
    with pytest.raises(OSError, match="nfs tier; choose another folder"):
        asyncio.run(disk(tmp_path).open())
