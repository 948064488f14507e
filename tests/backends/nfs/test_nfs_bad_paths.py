"""One path that holds no object, or cannot be used, harms that object alone."""

from __future__ import annotations

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
