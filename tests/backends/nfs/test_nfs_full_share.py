"""A full share rejects stores, and nothing worse: loads go on, and the tier stays in use."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from offload_core.api.backend import LoadOutcome, StoreOutcome
from tests.backends.disk.conftest import small_disk, tmpfs
from tests.backends.nfs.calls import run, store
from tests.backends.nfs.conftest import Nfs, key
from tests.backends.nfs.tier_rig import TierRig
from tests.support.paths import ROOT

HIT = LoadOutcome.HIT
STORED, REJECTED = StoreOutcome.STORED, StoreOutcome.REJECTED
LIMITS = {"capacity": "100MiB", "lease_seconds": 1, "eviction_grace": 0.2}
__all__ = ["small_disk"]  # a fixture


@pytest.fixture
def larger_disk() -> Iterator[Path]:
    with tmpfs("1m") as folder:
        yield folder


def fill(folder: Path) -> Path:
    """Leave no free block on the file system of ``folder``."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    assert os.statvfs(folder).f_bavail == 0
    return filler


@pytest.mark.parametrize("options", [{}, LIMITS], ids=["without a capacity", "with a capacity"])
def test_a_full_share_serves_all_loads_while_stores_are_rejected(
    small_disk: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    async def work(rig: TierRig) -> None:
        assert await rig.store(*range(4)) == [True] * 4
        filler = fill(small_disk)
        outcomes: Counter[Any] = Counter()
        stored = 0
        for number in range(100, 160):
            stored += sum(await rig.store(number))
            outcomes.update(await rig.load(number % 4))
            await asyncio.sleep(0.02 if options else 0)  # longer than a lease, all in all
        assert outcomes == {HIT: 60}
        assert stored == 0
        assert await rig.lookup(*range(4)) == [True] * 4
        filler.unlink()
        for _ in range(200):
            if all(await rig.store(200)):
                break
            await asyncio.sleep(0.05)
        assert await rig.load(200, 0) == [HIT, HIT]

    with caplog.at_level(logging.WARNING):
        TierRig(url=f"file://{small_disk}", lookup_cache_seconds=0, **options).run(work)
    assert "circuit" not in caplog.text
    assert sum("No space left" in record.getMessage() for record in caplog.records) <= 2, caplog.text
    assert not [path for path in (small_disk / ".temporary").iterdir() if path.name.endswith(".tmp")]


def test_a_share_that_is_full_at_the_start_is_opened_and_read(small_disk: Path) -> None:
    url = f"file://{small_disk}"
    TierRig(url=url).run(lambda rig: rig.store(0))
    (small_disk / ".offload-core-share").unlink()  # has to be made again
    fill(small_disk)
    for options in ({}, LIMITS):
        assert TierRig(url=url, **options).run(lambda rig: rig.load(0)) == [HIT]


def test_objects_on_a_full_share_with_a_capacity_can_be_deleted(nfs: Nfs, small_disk: Path) -> None:
    async def work(backend: Any) -> None:
        await store(backend, (0, bytes(4096)), (1, bytes(4096)))
        filler = fill(small_disk)
        await backend.delete([key(0)])
        assert await backend.contains([key(0), key(1)]) == [False, True]
        filler.unlink()

    run(nfs(url=f"file://{small_disk}", lookup_cache_seconds=0, **LIMITS), work)


@pytest.mark.parametrize("restarted", [False, True], ids=["the same process", "another process"])
def test_objects_are_evicted_from_a_full_share(nfs: Nfs, larger_disk: Path, restarted: bool) -> None:
    options = {"url": f"file://{larger_disk}", "lookup_cache_seconds": 0, **LIMITS, "capacity": "390KiB"}

    async def fill_up(backend: Any) -> None:
        for number in range(9):  # the last one is above the high watermark
            assert await store(backend, (number, bytes(40 * 1024))) == [STORED]
        fill(larger_disk)
        if not restarted:
            await evict(backend)

    async def evict(backend: Any) -> None:
        for _ in range(200):
            if (await store(backend, (100, bytes(20 * 1024)))) == [STORED]:
                break
            await asyncio.sleep(0.05)
        else:
            raise AssertionError("nothing was evicted")
        assert sum(await backend.contains([key(number) for number in range(9)])) >= 6

    run(nfs(**options), fill_up)
    if restarted:
        run(nfs(**options), evict)


def test_an_object_beyond_the_largest_file_is_rejected_alone(tmp_path: Path) -> None:
    """In a process of its own: the limit (EFBIG) holds for the files of pytest too."""
    command = [sys.executable, "-m", "tests.backends.nfs.limited_engine", f"file://{tmp_path}/kv"]
    engine = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert engine.returncode == 0, engine.stderr


def test_a_full_quota_is_a_full_share(nfs: Nfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def over_quota(descriptor: int, data: Any, offset: int) -> int:
        if len(data) > 5:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return real(descriptor, data, offset)

    async def work(backend: Any) -> None:
        monkeypatch.setattr(os, "pwrite", over_quota)
        assert await store(backend, (0, b"too large"), (1, b"small")) == [REJECTED, STORED]

    run(nfs(url=f"file://{tmp_path}/kv"), work)
