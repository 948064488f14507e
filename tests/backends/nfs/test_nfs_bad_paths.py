"""One path that holds no object, or cannot be used, harms that object alone."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from offload_backend_nfs import NfsBackend
from offload_backend_nfs.storage import posix_files

from offload_core.api.backend import LoadOutcome, StoreOutcome
from tests.backends.nfs.calls import contains, listed, run, store
from tests.backends.nfs.conftest import Nfs, key
from tests.backends.nfs.tier_rig import TierRig
from tests.backends.nfs.unprivileged_engine import path_of
from tests.support.paths import ROOT

HIT = LoadOutcome.HIT
LIMITS = {"capacity": "10MiB", "eviction_grace": 0}


def full_folder(path: Path) -> None:
    path.mkdir()
    (path / "file").write_text("foreign")


def unreadable(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_text("a file in place of the folder")


OBSTACLES: dict[str, Callable[[Path], Any]] = {
    "folder": Path.mkdir,
    "full folder": full_folder,
    "fifo": os.mkfifo,
    "link to itself": lambda path: path.symlink_to(path),
    "link to nothing": lambda path: path.symlink_to("/nonexistent/file"),
    "link to an endless file": lambda path: path.symlink_to("/dev/zero"),
    "file in place of the folder": unreadable,
}


@pytest.mark.parametrize("options", [{}, LIMITS], ids=["without a capacity", "with a capacity"])
@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_one_bad_path_is_a_miss_and_the_rest_of_the_batch_is_stored_and_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, obstacle: str, options: dict[str, Any]
) -> None:
    root = tmp_path / "kv"
    path = path_of(root, 0)

    async def work(rig: TierRig) -> None:
        path.parent.mkdir(parents=True)
        OBSTACLES[obstacle](path)
        assert await rig.lookup(0) == [False]
        assert await rig.load(0) == [LoadOutcome.MISS]
        for turn in range(7):
            others = [turn * 10 + i for i in range(1, 4)]
            stored = await rig.store(0, *others)
            assert stored[1:] == [True] * 3
            assert await rig.lookup(0, *others) == [stored[0], True, True, True]
            assert (await rig.load(0, *others))[1:] == [HIT] * 3

    with caplog.at_level(logging.WARNING):
        TierRig(url=f"file://{root}", lookup_cache_seconds=0, **options).run(work)
    assert len(caplog.records) <= 2, caplog.text


@pytest.mark.parametrize("options", [{}, LIMITS], ids=["without a capacity", "with a capacity"])
def test_a_bad_path_is_deleted_and_listed_around(nfs: Nfs, tmp_path: Path, options: dict[str, Any]) -> None:
    root = tmp_path / "kv"

    async def work(backend: NfsBackend) -> None:
        await store(backend, *((number, b"some bytes") for number in range(1, 4)))
        full_folder_at = path_of(root, 0)
        full_folder_at.parent.mkdir(parents=True)
        full_folder(full_folder_at)
        assert sorted(one.key for one in await listed(backend)) == [key(1), key(2), key(3)]
        await backend.delete([key(0), key(1), key(2)])
        assert await contains(backend, 0, 1, 2, 3) == [False, False, False, True]
        assert await store(backend, (0, b"zero"), (4, b"four")) == [StoreOutcome.REJECTED, StoreOutcome.STORED]
        assert (full_folder_at / "file").exists()

    run(nfs(url=f"file://{root}", lookup_cache_seconds=0, **options), work)


class BadSectors:
    """A share whose server cannot read some files."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: set[str] = set()
        self.tries = 0
        self._root = root
        self._read = posix_files.read_object
        monkeypatch.setattr("offload_backend_nfs.storage.posix.read_object", self._read_object)

    def add(self, *numbers: int) -> None:
        self.paths |= {str(path_of(self._root, number)) for number in numbers}

    def _read_object(self, path: str, *arguments: Any) -> LoadOutcome:
        if path in self.paths:
            self.tries += 1
            raise OSError(errno.EIO, "Input/output error", path)
        return self._read(path, *arguments)


@pytest.mark.parametrize("options", [{}, LIMITS], ids=["without a capacity", "with a capacity"])
def test_an_unreadable_object_counts_as_damaged_if_others_can_be_read_and_is_stored_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    root = tmp_path / "kv"
    sectors = BadSectors(root, monkeypatch)

    async def work(rig: TierRig) -> None:
        assert await rig.store(0, 1, 2) == [True] * 3
        sectors.add(0)
        assert await rig.load(0, 1, 2) == [LoadOutcome.CORRUPT, HIT, HIT]
        assert await rig.lookup(0, 1, 2) == [False, True, True]
        sectors.paths.clear()
        assert await rig.store(0) == [True]
        assert await rig.load(0, 1, 2) == [HIT] * 3

    with caplog.at_level(logging.WARNING):
        TierRig(url=f"file://{root}", lookup_cache_seconds=0, retry_seconds=0, **options).run(work)
    assert len([line for line in caplog.messages if "cannot be read" in line]) == 1, caplog.text


def test_a_known_unreadable_object_is_not_retried_until_it_was_read_or_deleted(
    nfs: Nfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sectors = BadSectors(tmp_path / "kv", monkeypatch)
    monkeypatch.setattr("offload_backend_nfs.storage.retry._LONGEST_WAIT_SECONDS", 0.05)

    async def outcomes(backend: NfsBackend, *numbers: int) -> tuple[list[LoadOutcome], bool]:
        """Return the outcomes of a load, and whether an unreadable object was tried more than once."""
        sectors.tries = 0
        buffers = [memoryview(bytearray(6)) for _ in numbers]
        found = await backend.load_into([key(number) for number in numbers], buffers)
        return list(found), sectors.tries > 1

    async def work(backend: NfsBackend) -> None:
        await store(backend, *((number, b"object") for number in range(3)))
        sectors.add(0)
        assert await outcomes(backend, 0, 1, 2) == ([LoadOutcome.CORRUPT, HIT, HIT], True)
        assert await outcomes(backend, 0, 1, 2) == ([LoadOutcome.CORRUPT, HIT, HIT], False)
        assert await outcomes(backend, 0) == ([LoadOutcome.CORRUPT], False)
        sectors.paths.clear()
        assert await outcomes(backend, 0) == ([HIT], False)
        sectors.add(0)
        assert await outcomes(backend, 0, 1) == ([LoadOutcome.CORRUPT, HIT], True)
        await backend.delete([key(0)])
        await store(backend, (0, b"object"))
        assert await outcomes(backend, 0, 1) == ([LoadOutcome.CORRUPT, HIT], True)

    run(nfs(url=f"file://{tmp_path}/kv", retry_seconds=0.3), work)


def test_a_share_that_can_read_nothing_or_not_several_objects_has_failed(
    nfs: Nfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sectors = BadSectors(tmp_path / "kv", monkeypatch)

    async def work(backend: NfsBackend) -> None:
        await store(backend, *((number, b"object") for number in range(3)))
        sectors.add(0, 1)
        for numbers in ([0], [0, 1], [0, 1, 2], [0, 9]):
            keys = [key(number) for number in numbers]
            with pytest.raises(OSError, match="Input/output error"):
                await backend.load_into(keys, [memoryview(bytearray(6)) for _ in keys])

    run(nfs(url=f"file://{tmp_path}/kv", retry_seconds=0), work)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize("options", [{}, LIMITS], ids=["without a capacity", "with a capacity"])
def test_objects_without_permission_are_misses_and_a_root_without_permission_is_an_error(
    options: dict[str, Any],
) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as above:
        root = Path(above) / "kv"
        root.mkdir()
        Path(above).chmod(0o755)
        os.chown(root, 65534, 65534)
        given = {"url": f"file://{root}", "lookup_cache_seconds": 0, "retry_seconds": 0, **options}
        child = subprocess.run(
            [sys.executable, "-m", "tests.backends.nfs.unprivileged_engine", str(root), json.dumps(given)],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=ROOT,
        )
    assert child.stdout.splitlines() == [
        "['STORED', 'STORED', 'STORED', 'STORED']",
        "['MISS', 'MISS', 'HIT', 'HIT']",
        "[False, True, True]",
        "[0, 2, 3]",
        "['REJECTED', 'STORED']",
        "PermissionError",
        "PermissionError",
    ], child.stderr
