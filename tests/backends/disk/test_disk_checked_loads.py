"""Loads in one call: each part is checked on the thread that read it, and objects are pinned meanwhile."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from offload_backend_disk import DiskBackend

from offload_core.api import CHECK_BYTES, LoadCheck
from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.testing.rig.recording_check import RecordingCheck
from tests.backends.disk.conftest import Disk, files_under, key, open_account
from tests.backends.disk.test_disk_direct import filled, page_aligned

HIT, MISS, CORRUPT = LoadOutcome.HIT, LoadOutcome.MISS, LoadOutcome.CORRUPT
SIZE = 3 * CHECK_BYTES + 4096
CAPACITY = 2 * SIZE


class Watched(RecordingCheck):
    """Records its thread too."""

    def __init__(self, buffer: memoryview, steps: list[tuple[str, int, int]]) -> None:
        super().__init__(buffer)
        self._steps = steps

    def filled(self, nbytes: int) -> bool:
        self._steps.append(("filled", nbytes, threading.get_ident()))
        return super().filled(nbytes)


async def stored(backend: DiskBackend, content: bytes) -> None:
    await backend.open()
    reservation = await backend.prepare_store([key(1)], [len(content)])
    assert await backend.store([key(1)], [filled(content).toreadonly()]) == [StoreOutcome.STORED]
    await reservation.release()


async def loaded(backend: DiskBackend, buffer: memoryview, check: LoadCheck | None = None) -> LoadOutcome:
    (outcome,) = await backend.load_and_check([key(1)], [buffer], [check or RecordingCheck(buffer)])
    return outcome


def watch_reads(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[], None] = lambda: None
) -> list[tuple[str, int, int]]:
    steps: list[tuple[str, int, int]] = []
    preadv = os.preadv

    def watched(descriptor: int, buffers: Any, offset: int) -> int:
        before()
        count = preadv(descriptor, buffers, offset)
        steps.append(("read", count, threading.get_ident()))
        return count

    monkeypatch.setattr(os, "preadv", watched)
    return steps


def test_each_part_is_checked_on_its_thread_before_the_next_one_is_read(
    backend: DiskBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, buffer = os.urandom(SIZE), page_aligned(SIZE)
    asyncio.run(stored(backend, content))
    steps = watch_reads(monkeypatch)
    check = Watched(buffer, steps)
    assert asyncio.run(loaded(backend, buffer, check)) is HIT
    assert check.told == content
    reads, told = steps[::2], steps[1::2]
    assert len(reads) == 3
    assert [("read", nbytes, thread) for _, nbytes, thread in told] == reads
    assert {thread for _, _, thread in steps} != {threading.get_ident()}


def test_past_the_page_cache_an_object_is_read_at_once_and_checked_by_others(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = disk(tmp_path / "objects", direct_io="on")
    content, buffer = os.urandom(SIZE), page_aligned(SIZE)
    asyncio.run(stored(backend, content))
    steps = watch_reads(monkeypatch)
    check = Watched(buffer, steps)
    assert asyncio.run(loaded(backend, buffer, check)) is HIT
    assert (bytes(buffer), [name for name, _, _ in steps]) == (content, ["read"])


def test_a_file_that_is_cut_short_while_it_is_read_is_corrupt(
    backend: DiskBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(stored(backend, os.urandom(SIZE)))
    (path,) = files_under(tmp_path)
    watch_reads(monkeypatch, lambda: os.truncate(path, SIZE - 1))
    assert asyncio.run(loaded(backend, page_aligned(SIZE))) is CORRUPT


@pytest.mark.parametrize("fails", [False, True])
def test_an_object_is_pinned_while_it_is_loaded_and_no_longer(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    root = tmp_path / "objects"
    backend = disk(root, capacity=CAPACITY)
    asyncio.run(stored(backend, os.urandom(SIZE)))
    other = open_account(root, CAPACITY, "other")
    other.finish_scan()
    granted: list[Any] = []

    def reserve_all() -> None:
        granted.append(other.reserve([(key(2), CAPACITY)])[0])
        if fails:
            raise OSError(errno.EIO, "the disk is ill")

    watch_reads(monkeypatch, reserve_all)
    if fails:
        with pytest.raises(OSError, match="the disk is ill"):
            asyncio.run(loaded(backend, page_aligned(SIZE)))
    else:
        assert asyncio.run(loaded(backend, page_aligned(SIZE))) is HIT
    assert granted == [[None]] * (1 if fails else 3), "the object was evicted while it was read"
    assert other.reserve([(key(2), CAPACITY)])[0] != [None], "the object is still pinned"
    assert asyncio.run(loaded(backend, page_aligned(SIZE))) is MISS
    other.close()
