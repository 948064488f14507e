"""The nfs backend on a mounted share: objects that vanish, leftovers, and a share that is gone, full or read-only."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from offload_backend_nfs import NfsBackend
from offload_backend_nfs.storage.base import TEMPORARY_FOLDER
from offload_backend_nfs.storage.mounts import is_local
from offload_backend_nfs.storage.posix import MARKER, PosixShare

from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.api.one_pass import CHECK_BYTES
from tests.backends.disk.conftest import mount, small_disk
from tests.backends.nfs.calls import contains, listed, load, run, store
from tests.backends.nfs.conftest import Nfs, key
from tests.media.fuse.fixtures import _session_fault_fs, fault_fs
from tests.media.fuse.mount import FaultFs
from tests.support.polling import wait_until
from tests.support.space_watcher import SpaceWatcher, skip_without_preallocation

HIT, MISS = LoadOutcome.HIT, LoadOutcome.MISS
KIB, MIB = 1024, 1024 * 1024
__all__ = ["_session_fault_fs", "fault_fs", "small_disk"]  # fixtures


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "share" / "kv"


@pytest.fixture
def share(nfs: Nfs, root: Path) -> NfsBackend:
    root.parent.mkdir()
    return nfs(url=f"file://{root}", lookup_cache_seconds=0, retry_seconds=0.3)


def objects_under(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*.kv"))


def temporaries(root: Path) -> list[Path]:
    return sorted((root / TEMPORARY_FOLDER).iterdir())


def test_folders_and_files_are_private_whatever_the_umask(share: NfsBackend, root: Path) -> None:
    before = os.umask(0)
    try:
        run(share, lambda backend: store(backend, (0, b"users' text")))
    finally:
        os.umask(before)
    for path in [root, *root.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_an_object_that_another_process_deletes_while_it_is_read_is_a_hit_or_a_miss(
    share: NfsBackend, root: Path
) -> None:
    data = os.urandom(4 * MIB)
    script = (
        "import pathlib, sys\nwhile True:\n"
        "    for path in pathlib.Path(sys.argv[1]).rglob('*.kv'): path.unlink(missing_ok=True)"
    )

    async def work(backend: NfsBackend) -> list[LoadOutcome]:
        await store(backend, (0, data))
        seen: list[LoadOutcome] = []
        deadline = time.monotonic() + 60
        while seen.count(MISS) < 5 and time.monotonic() < deadline:
            await store(backend, (0, data))
            outcome, got = await load(backend, 0, len(data))
            assert outcome is MISS or got == data
            seen.append(outcome)
        return seen

    deleter = subprocess.Popen([sys.executable, "-c", script, str(root)])
    try:
        assert run(share, work).count(MISS) == 5
    finally:
        deleter.kill()
        deleter.wait()


@pytest.mark.parametrize("deleted", [True, False], ids=["and it is gone", "and another is there"])
def test_estale_during_a_read_is_retried_once(
    share: NfsBackend, root: Path, monkeypatch: pytest.MonkeyPatch, deleted: bool
) -> None:
    data = os.urandom(64 * KIB)
    real = os.preadv
    stale: list[int] = []

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        if not stale:
            stale.append(descriptor)
            if deleted:
                for path in objects_under(root):
                    path.unlink()
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(descriptor, buffers, offset)

    async def work(backend: NfsBackend) -> tuple[LoadOutcome, bytes]:
        await store(backend, (0, data))
        monkeypatch.setattr(os, "preadv", preadv)
        return await load(backend, 0, len(data))

    outcome, got = run(share, work)
    assert stale
    assert (outcome, got == data) == ((MISS, False) if deleted else (HIT, True))


def test_estale_of_one_object_leaves_the_rest_of_the_batch_alone(
    share: NfsBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def opening(path: Any, *arguments: Any, **named: Any) -> int:
        if key(1).chunk_hash.hex() in str(path):
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(path, *arguments, **named)

    async def work(backend: NfsBackend) -> list[LoadOutcome]:
        await store(backend, (0, b"zero"), (1, b"one"), (2, b"two!"))
        monkeypatch.setattr(os, "open", opening)
        buffers = [memoryview(bytearray(4)), memoryview(bytearray(3)), memoryview(bytearray(4))]
        return list(await backend.load_into([key(0), key(1), key(2)], buffers))

    assert run(share, work) == [HIT, MISS, HIT]


def test_leftovers_and_foreign_files_are_not_listed(share: NfsBackend, root: Path) -> None:
    async def work(backend: NfsBackend) -> None:
        await store(backend, (0, b"object"))
        (path,) = objects_under(root)
        for name in (".nfs0000000000a1", ".nfs0000000000a2.kv", f".{path.name}", "notes.kv", "ff" * 32 + ".kv"):
            (path.parent / name).write_bytes(b"foreign")
        (root / TEMPORARY_FOLDER / "left.kv").write_bytes(b"left")
        (path.parent / ("00" * 31 + "01.kv")).mkdir()
        assert [(found.key, found.nbytes) for found in await listed(backend)] == [(key(0), 6)]

    run(share, work)


_KILLED = """
    import asyncio, os, sys, time
    from offload_backend_nfs import NfsBackend, NfsOptions
    from offload_core.api.backend import BackendContext
    from offload_core.api.keys import ObjectKey
    from offload_core.runtime.threads import DaemonExecutor

    def stop(*paths):
        print("written", flush=True)
        time.sleep(600)

    async def main():
        backend = NfsBackend(NfsOptions(url=sys.argv[1]), BackendContext("killed", DaemonExecutor(1, "killed")))
        await backend.open()
        os.replace = stop
        await backend.store([ObjectKey("ab" * 32, "full-u256", bytes(32))], [memoryview(bytes(1000))])

    asyncio.run(main())
"""


def test_leftovers_of_a_killed_writer_are_removed_and_a_living_writers_are_not(
    share: NfsBackend, root: Path, nfs: Nfs
) -> None:
    command = [sys.executable, "-c", textwrap.dedent(_KILLED), f"file://{root}"]
    writers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"written\n"
        old = root / TEMPORARY_FOLDER / "0123456789abcdef-1-0123456789abcdef.tmp"  # another host's
        young = old.with_name("0123456789abcdef-2-0123456789abcdef.tmp")
        foreign = old.with_name("notes.txt")
        for path in (old, young, foreign):
            path.write_bytes(b"x")
        for path in (old, foreign):
            os.utime(path, (time.time() - 2 * 86_400,) * 2)
        writers[0].kill()
        writers[0].wait()
        assert len(temporaries(root)) == 5

        async def work(backend: NfsBackend) -> None:
            await store(backend, (1, b"works"))
            await asyncio.to_thread(wait_until, lambda: len(temporaries(root)) <= 3, "the leftovers were not removed")

        run(share, work)
        assert {path.name for path in temporaries(root)} >= {young.name, foreign.name}
        assert len(temporaries(root)) == 3, "the killed writer's and the old one are gone, the living writer's is not"
        assert len(objects_under(root)) == 1
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()


def _unmount(root: Path) -> None:
    """Leave an empty folder in place of the share, as unmounting does."""
    root.rename(root.with_name("away"))
    root.mkdir()


def bring_back(root: Path) -> None:
    if root.exists():
        root.rmdir()  # nothing is in it
    root.with_name("away").rename(root)


@pytest.mark.parametrize("vanish", [lambda root: root.rename(root.with_name("away")), _unmount], ids=["gone", "empty"])
def test_a_share_that_vanishes_is_an_error_and_is_not_made_again(
    share: NfsBackend, root: Path, vanish: Callable[[Path], object]
) -> None:
    async def work(backend: NfsBackend) -> None:
        await store(backend, (0, b"zero"))
        vanish(root)
        for call in (store(backend, (1, b"one")), contains(backend, 0), load(backend, 0, 4)):
            with pytest.raises(OSError, match="the share is gone") as caught:
                await call
            assert caught.value.errno == errno.ENODEV
            assert str(root) in str(caught.value)
        bring_back(root)
        assert await load(backend, 0, 4) == (HIT, b"zero")
        assert await store(backend, (1, b"one")) == [StoreOutcome.STORED]

    run(share, work)


def test_a_share_whose_mount_is_missing_cannot_be_opened(share: NfsBackend, root: Path) -> None:
    root.parent.rmdir()
    with pytest.raises(OSError, match="mount the share") as caught:
        run(share, lambda backend: contains(backend, 0))
    assert str(root) in str(caught.value)
    assert not root.parent.exists()


def test_c6_on_a_full_share_a_store_is_rejected_and_leaves_nothing_behind(nfs: Nfs, small_disk: Path) -> None:
    async def work(backend: NfsBackend) -> None:
        data = os.urandom(100 * KIB)
        assert await store(backend, (0, bytes(MIB))) == [StoreOutcome.REJECTED]
        assert temporaries(small_disk) == objects_under(small_disk) == []
        assert await contains(backend, 0) == [False]
        await store(backend, (0, data))
        assert await load(backend, 0, len(data)) == (HIT, data)

    run(nfs(url=f"file://{small_disk}"), work)


def test_a_read_only_share_is_opened_and_read_and_rejects_stores(nfs: Nfs, small_disk: Path) -> None:
    run(nfs(url=f"file://{small_disk}"), lambda backend: store(backend, (0, b"before")))
    mount("-o", "remount,ro", small_disk)

    async def work(backend: NfsBackend) -> None:
        assert await load(backend, 0, 6) == (HIT, b"before")
        with pytest.raises(OSError, match="Read-only") as caught:
            await store(backend, (1, b"after"))
        assert caught.value.errno == errno.EROFS
        with pytest.raises(OSError, match="Read-only"):
            await backend.delete([key(0)])
        assert await contains(backend, 0) == [True]

    run(nfs(url=f"file://{small_disk}"), work)


def test_operations_on_a_failing_disk_are_retried_for_retry_seconds(
    nfs: Nfs, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.parent.mkdir()
    real, tries = os.replace, []

    def replace(*arguments: Any) -> None:
        tries.append(time.monotonic())
        if len(tries) < 4:
            raise OSError(errno.EIO, "Input/output error")
        real(*arguments)

    async def work(backend: NfsBackend) -> None:
        await store(backend, (0, b"before"))  # which makes the folders
        monkeypatch.setattr(os, "replace", replace)
        await store(backend, (0, b"zero"))
        assert len(tries) == 4
        assert temporaries(root) == []
        assert await load(backend, 0, 4) == (HIT, b"zero")

    run(nfs(url=f"file://{root}", retry_seconds=30), work)

    async def at_once(backend: NfsBackend) -> None:
        with pytest.raises(OSError, match="Input/output") as caught:
            await store(backend, (1, b"one"))
        assert caught.value.errno == errno.EIO
        assert len(tries) == 1

    tries.clear()  # so that the next ones fail again
    run(nfs(url=f"file://{root}", retry_seconds=0), at_once)


def test_an_object_gets_its_name_after_its_bytes_are_on_the_server(nfs: Nfs, fault_fs: FaultFs) -> None:
    root = fault_fs.path / "kv"

    async def work(backend: NfsBackend) -> None:
        rule = fault_fs.add("fsync", "*", "error")
        with pytest.raises(OSError, match="Input/output"):
            await store(backend, (0, b"zero"))
        assert objects_under(root) == temporaries(root) == []
        fault_fs.remove(rule)
        await store(backend, (0, b"zero"))
        assert await load(backend, 0, 4) == (HIT, b"zero")

    run(nfs(url=f"file://{root}", lookup_cache_seconds=0, retry_seconds=0), work)


def test_on_a_local_file_system_no_store_waits_for_the_disk(
    nfs: Nfs, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async def work(backend: NfsBackend) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        await store(backend, (0, b"zero"))
        assert await load(backend, 0, 4) == (HIT, b"zero")

    run(nfs(url=f"file://{small_disk}", retry_seconds=0), work)


@pytest.mark.parametrize(
    ("folder", "local"),
    [
        ("/offload-data", True),
        ("/offload-data/kv", True),
        ("/offload-database", True),  # of the root, not of /offload-data
        ("/offload-mnt/kv", False),
        ("/offload-mnt/kv/disk", True),
        ("/offload-mnt/twice/kv", False),
        ("/offload-mnt/a share/kv", False),
        ("/offload-mnt/new/kv", False),
    ],
)
def test_the_nearest_mount_tells_whether_a_folder_is_local(tmp_path: Path, folder: str, local: bool) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "30 22 8:2 / /offload-data rw - xfs /dev/sda2 rw\n"
        "31 22 0:40 / /offload-mnt/kv rw shared:2 master:3 - nfs4 server:/kv rw\n"
        "32 31 8:3 / /offload-mnt/kv/disk rw - btrfs /dev/sdb1 rw\n"
        "33 22 8:4 / /offload-mnt/twice rw - ext4 /dev/sdc1 rw\n"
        "34 33 0:41 / /offload-mnt/twice rw - ceph mon:/ rw\n"
        "35 22 0:42 / /offload-mnt/a\\040share rw - fuse.sshfs host:/ rw\n"
        "36 22 0:43 / /offload-mnt/new rw - futurefs none rw\n"
    )
    assert is_local(folder, mounts) is local
    assert not is_local(folder, tmp_path / "missing")


@pytest.mark.parametrize("links", [True, False], ids=["with hard links", "without"])
def test_of_many_who_create_a_name_one_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    if not links:

        def link(*_: Any) -> None:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")

        monkeypatch.setattr(os, "link", link)
    shares = [PosixShare(tmp_path / "kv") for _ in range(2)]
    for share in shares:
        share.open()
    with ThreadPoolExecutor(8) as threads:
        for number in range(20):
            name = f"records/{number}"
            calls = [threads.submit(shares[i % 2].create, name, b"%d" % i) for i in range(8)]
            winners = [i for i, call in enumerate(calls) if call.result()]
            assert len(winners) == 1
            assert shares[0].read_small(name) == b"%d" % winners[0]
    shares[0].write_small("records/0", b"other")
    assert shares[1].read_small("records/0") == b"other"
    assert shares[1].read_small("records/none") is None
    assert [entry.name for entry in shares[1].entries("")] == ["records"]
    assert temporaries(tmp_path / "kv") == []
    assert (tmp_path / "kv" / MARKER).is_file()


def test_a_local_folder_allocates_the_space_of_a_large_object_before_it_writes_it(root: Path) -> None:
    root.mkdir(parents=True)
    content = os.urandom(2 * CHECK_BYTES)
    skip_without_preallocation(root, len(content))
    share = PosixShare(root)
    share.open()
    watcher = SpaceWatcher(root)
    share.store("object", memoryview(content), watcher)
    assert (root / "object").read_bytes() == content
    assert watcher.allocated_bytes[0] >= len(content)
