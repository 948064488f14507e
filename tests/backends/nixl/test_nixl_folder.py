"""The folder of a nixl tier: other users must not control it, and no failure leaves files or descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
from offload_backend_nixl.child.folder import TEMPORARY_FOLDER, TEMPORARY_LIFE_SECONDS, FolderStorage, _FileStore
from offload_backend_nixl.naming import name_of
from offload_backend_nixl.protocol import Outcome

from offload_core.api import LoadOutcome, StoreOutcome
from tests.backends.nixl.conftest import Nixl, key
from tests.media.fuse.mount import FaultFs

NAMES = [name_of(key(number)) for number in range(4)]


@pytest.fixture
def root(folder_options: dict[str, Any]) -> Path:
    root = Path(folder_options["path"])
    root.mkdir()
    return root


@pytest.mark.parametrize("mode", [0o777, 0o2775, 0o1777], ids=oct)
def test_a_folder_that_others_may_write_to_is_refused(
    nixl: Nixl, folder_options: dict[str, Any], root: Path, mode: int
) -> None:
    root.chmod(mode)
    backend = nixl(**folder_options)
    with pytest.raises(PermissionError, match=rf"mode {mode:04o}.*such as 0700.*chmod go-w"):
        asyncio.run(backend.open())
    asyncio.run(backend.close())
    assert list(root.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_the_folder_of_another_user_is_refused(nixl: Nixl, folder_options: dict[str, Any], root: Path) -> None:
    os.chown(root, 65534, 65534)
    backend = nixl(**folder_options)
    with pytest.raises(PermissionError, match=r"uid 65534.*must be root.*chown"):
        asyncio.run(backend.open())
    asyncio.run(backend.close())
    assert list(root.iterdir()) == []


def begin_store(storage: FolderStorage, name: str, content: bytes) -> _FileStore:
    """Begin a store and write its bytes, as NIXL does."""
    pending = storage.begin_store(name, len(content))
    assert isinstance(pending, _FileStore)
    os.pwrite(pending._descriptor, content, 0)
    return pending


def open_files(root: Path) -> list[str]:
    """Return the files below a folder that this process has open."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one of this listing
            found.append(str(descriptor.readlink()))
    return [path for path in found if path.startswith(str(root))]


@pytest.mark.parametrize("operation", ["flush", "getattr", "statfs"])
def test_a_store_that_fails_leaves_neither_file_nor_descriptor(fault_fs: FaultFs, operation: str) -> None:
    """Some network file systems report a full disk only when a file is closed."""
    root = fault_fs.path / "objects"
    storage = FolderStorage(str(root), "writer", create=True)
    temporary = fault_fs.backing / "objects" / TEMPORARY_FOLDER
    pending = None if operation == "statfs" else begin_store(storage, NAMES[0], b"x" * 100)
    fault = fault_fs.fault(operation, "/objects/.tmp*" if pending else "/", "error", number=errno.EDQUOT)
    with fault, pytest.raises(OSError, match=os.strerror(errno.EDQUOT)):
        pending.finish(True) if pending else storage.begin_store(NAMES[0], 100)
    if operation != "getattr":  # a removal asks for it too
        assert list(temporary.iterdir()) == []
    assert open_files(root) == []
    assert begin_store(storage, NAMES[0], b"x" * 100).finish(True) is Outcome.DONE


def test_a_load_that_fails_at_once_leaves_no_descriptor(fault_fs: FaultFs) -> None:
    root = fault_fs.path / "objects"
    storage = FolderStorage(str(root), "writer", create=True)
    begin_store(storage, NAMES[0], b"x" * 100).finish(True)
    with fault_fs.fault("getattr", "*.kv", "error"), pytest.raises(OSError, match=os.strerror(errno.EIO)):
        storage.begin_load(NAMES[0], 100)
    assert open_files(root) == []


def test_a_listing_passes_over_names_that_no_message_can_have(nixl: Nixl, folder_options: dict[str, Any]) -> None:
    async def run() -> None:
        backend = nixl(**folder_options)
        await backend.open()
        await backend.store([key(1)], [memoryview(b"x" * 100)])
        foreign = Path(folder_options["path"], NAMES[1]).with_name(os.fsdecode(b"caf\xe9.txt"))
        os.close(os.open(foreign, os.O_CREAT | os.O_WRONLY))
        assert [found.key async for batch in backend.list_objects() for found in batch] == [key(1)]
        await backend.close()

    asyncio.run(run())


@pytest.mark.parametrize("place", ["object", "folder"])
def test_something_else_in_the_place_of_an_object_costs_this_object_only(
    nixl: Nixl, folder_options: dict[str, Any], place: str
) -> None:
    root = Path(folder_options["path"])
    root.mkdir(mode=0o700)
    wrong = root / NAMES[1]
    if place == "object":
        wrong.mkdir(parents=True, mode=0o700)
    else:
        wrong.parent.parent.mkdir(parents=True)
        wrong.parent.symlink_to("/dev/null")

    async def run() -> None:
        backend = nixl(**folder_options)
        await backend.open()
        keys = [key(number) for number in range(4)]
        outcomes = await backend.store(keys, [memoryview(b"x" * 100)] * 4)
        assert outcomes == [StoreOutcome.REJECTED if number == 1 else StoreOutcome.STORED for number in range(4)]
        assert await backend.contains(keys) == [True, False, True, True]
        loaded = await backend.load_into(keys, [memoryview(bytearray(100)) for _ in keys])
        assert loaded == [LoadOutcome.MISS if number == 1 else LoadOutcome.HIT for number in range(4)]
        if place == "object":
            with pytest.raises(OSError, match=NAMES[1]):
                await backend.delete(keys)
        else:
            await backend.delete(keys)
        assert await backend.contains(keys) == [False] * 4
        await backend.close()

    asyncio.run(run())
    assert list((root / TEMPORARY_FOLDER).iterdir()) == []


def test_a_clock_that_is_ahead_does_not_make_leftovers_of_new_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "objects"
    pending = begin_store(FolderStorage(str(root), "writer", create=True), NAMES[0], b"x" * 100)
    old = root / TEMPORARY_FOLDER / "old-1-1"
    old.touch()
    os.utime(old, (1, 1))
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 2 * TEMPORARY_LIFE_SECONDS)
    FolderStorage(str(root), "other", create=True)
    assert not old.exists()
    assert pending.finish(True) is Outcome.DONE
    assert list((root / TEMPORARY_FOLDER).iterdir()) == []
