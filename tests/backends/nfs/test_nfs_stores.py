"""Stores behind fsspec: one in memory, and a local folder in place of a server that renames."""

from __future__ import annotations

import errno
import os
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from offload_backend_nfs import NfsBackend
from offload_backend_nfs.storage.base import TEMPORARY_FOLDER, Medium
from offload_backend_nfs.storage.failures import ForeignFileError
from offload_backend_nfs.storage.fsspec_store import ObjectStore, RenamingStore
from offload_backend_nfs.storage.posix import PosixShare

from offload_core.api.backend import LoadOutcome
from tests.backends.nfs.calls import contains, listed, load, run, store
from tests.backends.nfs.conftest import Nfs, key

HIT, MISS, CORRUPT = LoadOutcome.HIT, LoadOutcome.MISS, LoadOutcome.CORRUPT

Make = Callable[[], Medium]


@pytest.fixture(params=["memory", "renaming"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    if request.param == "memory":
        root = f"/{uuid.uuid4().hex}"
        return lambda: ObjectStore(MemoryFileSystem(skip_instance_cache=True), root)
    return lambda: RenamingStore(LocalFileSystem(skip_instance_cache=True), f"{tmp_path}/kv")


def test_objects_come_and_go(make: Make) -> None:
    one, other = make(), make()
    one.open()
    other.open()
    one.store("a/b/x.kv", memoryview(b"x"))
    one.store("a/b/x.kv", memoryview(b"other"))
    one.store("a/b/empty.kv", memoryview(b""))
    assert other.sizes(["a/b/x.kv", "a/b", "none", "a/b/empty.kv"]) == [5, None, None, 0]
    buffer = bytearray(5)
    assert other.load("a/b/x.kv", memoryview(buffer)) is HIT
    assert buffer == b"other"
    assert other.load("a/b/x.kv", memoryview(bytearray(4))) is CORRUPT
    assert other.load("none", memoryview(buffer)) is MISS
    assert [(entry.name, entry.is_folder) for entry in other.entries("")] == [("a", True)]
    entries = other.entries("a/b")
    assert {(entry.name, entry.is_folder, entry.nbytes) for entry in entries} == {
        ("x.kv", False, 5),
        ("empty.kv", False, 0),
    }
    assert all(abs(entry.modified_seconds - time.time()) < 3600 for entry in entries)
    assert other.entries("none") == []
    other.delete(["a/b/x.kv", "none"])
    assert one.sizes(["a/b/x.kv"]) == [None]
    one.write_small("mark", b"1")
    assert (other.read_small("mark"), other.read_small("none")) == (b"1", None)
    one.close()


def test_of_many_who_create_a_name_one_succeeds(make: Make) -> None:
    media = [make() for _ in range(2)]
    media[0].open()
    with ThreadPoolExecutor(8) as threads:
        for number in range(20):
            calls = [threads.submit(media[i % 2].create, f"records/{number}", b"%d" % i) for i in range(8)]
            winners = [i for i, call in enumerate(calls) if call.result()]
            assert len(winners) == 1
            assert media[1].read_small(f"records/{number}") == b"%d" % winners[0]


def test_in_memory_no_caller_comes_between_the_check_and_the_creation() -> None:
    together = threading.Barrier(2)

    class Slow(MemoryFileSystem):  # type: ignore[misc] # fsspec has no types
        def exists(self, path: str, **_: Any) -> bool:
            found = path in self.store
            with suppress(threading.BrokenBarrierError):  # nobody else is between here and the creation
                together.wait(0.1)
            return found

    root = f"/{uuid.uuid4().hex}"
    with ThreadPoolExecutor(2) as threads:
        calls = [
            threads.submit(ObjectStore(Slow(skip_instance_cache=True), root).create, "owner", b"%d" % number)
            for number in range(2)
        ]
        assert sorted(call.result() for call in calls) == [False, True]


def test_a_store_that_fails_before_its_rename_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fs = LocalFileSystem(skip_instance_cache=True)
    medium = RenamingStore(fs, f"{tmp_path}/kv")
    medium.open()

    def mv(*_: Any, **__: Any) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(fs, "mv", mv)
    with pytest.raises(PermissionError):
        medium.store("a/x.kv", memoryview(b"x"))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_temporaries_older_than_a_day_are_removed(tmp_path: Path) -> None:
    medium = RenamingStore(LocalFileSystem(skip_instance_cache=True), f"{tmp_path}/kv")
    medium.open()
    folder = tmp_path / "kv" / TEMPORARY_FOLDER
    names = [f"0123456789abcdef-{number}-0123456789abcdef.tmp" for number in range(2)]
    for name in [*names, "notes.txt"]:
        (folder / name).write_text("x")
    for name in [names[0], "notes.txt"]:
        os.utime(folder / name, (time.time() - 2 * 86_400,) * 2)
    assert medium.remove_leftovers(lambda: True) == 0
    assert medium.remove_leftovers(lambda: False) == 1
    assert {path.name for path in folder.iterdir()} == {names[1], "notes.txt"}


class SftpLikeFileSystem(LocalFileSystem):  # type: ignore[misc] # fsspec has no types
    """A file system that makes folders as fsspec does by SFTP: it asks first, and an existing one is ``Failure``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.all_have_asked = threading.Barrier(1)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        for folder in [*reversed(Path(path).parents), Path(path)]:
            if not folder.exists():
                with suppress(threading.BrokenBarrierError):
                    self.all_have_asked.wait(5)  # once; a barrier that was missed stays open
                try:
                    folder.mkdir()
                except FileExistsError:
                    raise OSError("Failure") from None

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        Path(path1).replace(path2)


def test_several_writers_make_the_folders_of_a_new_pack_at_once(tmp_path: Path) -> None:
    writers = 4
    fs = SftpLikeFileSystem(skip_instance_cache=True)
    medium = RenamingStore(fs, f"{tmp_path}/kv")
    medium.open()
    fs.all_have_asked = threading.Barrier(writers)
    names = [f"namespace/pack/{number % 2}/{number}.kv" for number in range(writers)]
    with ThreadPoolExecutor(writers) as threads:
        list(threads.map(lambda name: medium.store(name, memoryview(b"object")), names))
    assert medium.sizes(names) == [6] * writers


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    medium = RenamingStore(SftpLikeFileSystem(skip_instance_cache=True), f"{tmp_path}/kv")
    medium.open()
    (tmp_path / "kv" / "namespace").write_text("a file")
    with pytest.raises(OSError, match=r"Not a directory|Failure"):
        medium.store("namespace/pack/0/0.kv", memoryview(b"object"))


class SmbLikeError(OSError):
    """An error with a number, of a class of its own, as smbprotocol raises it."""


class SmbLikeFileSystem(LocalFileSystem):  # type: ignore[misc] # fsspec has no types
    """A file system that replaces no file by a rename."""

    before_mv: Callable[[], object] = staticmethod(lambda: None)

    def info(self, path: str, **named: Any) -> Any:
        return self._call(super().info, path, **named)

    def cat_file(self, path: str, *arguments: Any, **named: Any) -> Any:
        return self._call(super().cat_file, path, *arguments, **named)

    def rm_file(self, path: str) -> None:
        self._call(super().rm_file, path)

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        self.before_mv()
        if Path(path2).exists():
            raise SmbLikeError(errno.EEXIST, "File exists", path1)
        self._call(Path(path1).replace, path2)

    def _call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except OSError as error:
            raise SmbLikeError(error.errno, error.strerror) from None


def test_an_absent_object_is_a_miss_whatever_the_class_of_the_error(tmp_path: Path) -> None:
    medium = RenamingStore(SmbLikeFileSystem(skip_instance_cache=True), f"{tmp_path}/kv")
    medium.open()
    assert medium.sizes(["a/x.kv"]) == [None]
    assert medium.load("a/x.kv", memoryview(bytearray(1))) is MISS
    assert medium.read_small("a/x.kv") is None
    medium.delete(["a/x.kv"])
    medium.store("a/x.kv", memoryview(b"x"))
    assert medium.sizes(["a/x.kv"]) == [1]


def test_a_store_replaces_an_object_though_a_rename_does_not(tmp_path: Path) -> None:
    fs = SmbLikeFileSystem(skip_instance_cache=True)
    medium, other = (RenamingStore(one, f"{tmp_path}/kv") for one in (fs, LocalFileSystem(skip_instance_cache=True)))
    medium.open()
    medium.store("a/x.kv", memoryview(b"x"))
    medium.store("a/x.kv", memoryview(b"other"))
    assert medium.read_small("a/x.kv") == b"other"
    moments = iter([lambda: other.store("a/x.kv", memoryview(b"between"))] * 2)
    fs.before_mv = lambda: next(moments, lambda: None)()
    medium.store("a/x.kv", memoryview(b"last"))
    assert medium.read_small("a/x.kv") == b"last"
    assert list((tmp_path / "kv" / TEMPORARY_FOLDER).iterdir()) == []


class LateFileSystem(LocalFileSystem):  # type: ignore[misc] # fsspec has no types
    """A file system with a clock that is two days behind."""

    def pipe_file(self, path: str, value: bytes, *arguments: Any, **named: Any) -> None:
        super().pipe_file(path, value, *arguments, **named)
        os.utime(path, (time.time() - 2 * 86_400,) * 2)


class LateShare(PosixShare):
    """A share on a server with a clock that is two days behind."""

    def _write_temporary(self, *arguments: Any) -> str:
        path = super()._write_temporary(*arguments)
        os.utime(path, (time.time() - 2 * 86_400,) * 2)
        return path


@pytest.mark.parametrize("kind", ["share", "renaming"])
def test_the_age_of_a_temporary_is_measured_by_the_clock_of_the_server(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "kv"
    medium: Medium = LateShare(root)
    if kind == "renaming":
        medium = RenamingStore(LateFileSystem(skip_instance_cache=True), str(root))
    medium.open()
    folder = root / TEMPORARY_FOLDER
    folder.mkdir(exist_ok=True)
    for number, days in enumerate((2, 4)):  # being written now, and left behind, by another host
        path = folder / f"0123456789abcdef-{number}-0123456789abcdef.tmp"
        path.write_text("x")
        os.utime(path, (time.time() - days * 86_400,) * 2)
    assert medium.remove_leftovers(lambda: False) == 1
    assert [path.name[17] for path in folder.iterdir()] == ["0"]


def test_a_backend_on_a_store_in_memory(nfs: Nfs) -> None:
    async def work(backend: NfsBackend) -> None:
        await store(backend, (0, b"zero"), (1, b"one"))
        assert await contains(backend, 0, 1, 2) == [True, True, False]
        assert await load(backend, 1, 3) == (HIT, b"one")
        assert {found.key for found in await listed(backend)} == {key(0), key(1)}
        await backend.delete([key(0), key(2)])
        assert await contains(backend, 0, 1) == [False, True]

    run(nfs(url=f"memory://{uuid.uuid4().hex}"), work)


def test_small_objects_are_read_with_a_bound_and_moved_aside(make: Make) -> None:
    medium = make()
    medium.open()
    medium.store("records/large", memoryview(bytes(1001)))
    medium.store("records/full", memoryview(bytes(1000)))
    medium.store("records/folder/inner", memoryview(b"inner"))
    assert medium.read_small("records/full", 1000) == bytes(1000)
    with pytest.raises(ForeignFileError, match="more than 1000 bytes"):
        medium.read_small("records/large", 1000)
    with pytest.raises(ForeignFileError, match="no file"):
        medium.read_small("records/folder", 1000)
    medium.move("records/large", "aside/large-1")
    medium.move("records/none", "aside/none")
    assert (medium.names("aside"), medium.sizes(["aside/large-1", "records/large"])) == (["large-1"], [1001, None])
