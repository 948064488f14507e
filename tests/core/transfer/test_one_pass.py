"""Bytes on their way to tiers and back: hashed once, and written to files from the staging memory itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload_core.objects import format as object_format
from offload_core.runtime.io_loop import IoLoop
from tests.support.transfer_rig import SECONDS, Rig, disk_tier, item

PAGE_BYTES = 64 * 1024


@pytest.fixture
def rig(io: IoLoop) -> Iterator[Rig]:
    rig = Rig(io, page_bytes=PAGE_BYTES)
    yield rig
    rig.finish()


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each payload that was hashed."""
    sizes: list[int] = []
    checksum = object_format.checksum

    def counted(data: memoryview) -> bytes:
        sizes.append(len(data))
        return checksum(data)

    monkeypatch.setattr(object_format, "checksum", counted)
    return sizes


def test_a_store_is_hashed_once_for_all_tiers_and_a_load_is_checked_once(
    rig: Rig, hashed: list[int], tmp_path: Path
) -> None:
    rig.add_memory_tier("memory")
    rig.add_tier(disk_tier("disk", str(tmp_path)))
    rig.start()
    rig.store_all(item(1, block=1))
    assert hashed == [PAGE_BYTES]
    rig.load(item(1, block=9), tier="disk")
    assert rig.result().status == "loaded"
    assert hashed == [PAGE_BYTES] * 2


def test_a_promoted_object_is_not_hashed_again(rig: Rig, hashed: list[int], tmp_path: Path) -> None:
    fast = rig.add_memory_tier("fast", write_policy="second-touch")
    rig.add_tier(disk_tier("slow", str(tmp_path)))
    rig.start()
    rig.store_all(item(1, block=1))
    assert not fast.objects
    rig.load(item(1, block=9), tier="slow")
    assert rig.result().status == "loaded"
    assert rig.engine.drain_stores(SECONDS)
    assert fast.objects
    assert hashed == [PAGE_BYTES] * 2, "sealed at the store, checked at the load"


def test_a_file_is_written_from_staging_and_read_into_it(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: dict[str, list[int]] = {"write": [], "read": []}

    def watch(name: str, kind: str) -> None:
        system_call = getattr(os, name)

        def watched(descriptor: int, buffers: Any, *rest: int) -> Any:
            for buffer in buffers if isinstance(buffers, list | tuple) else [buffers]:
                if not isinstance(buffer, int) and len(buffer) >= PAGE_BYTES // 2:
                    moved[kind].append(np.frombuffer(buffer, np.uint8).ctypes.data)
            return system_call(descriptor, buffers, *rest)

        monkeypatch.setattr(os, name, watched)

    for name in ("write", "writev", "pwrite", "pwritev"):
        watch(name, "write")
    for name in ("readv", "preadv"):
        watch(name, "read")
    rig.add_tier(disk_tier("disk", str(tmp_path)))
    rig.start()
    rig.store_all(item(1, block=1))
    rig.load(item(1, block=9), tier="disk")
    assert rig.result().status == "loaded"
    start = rig.staging.tensor.data_ptr()
    for kind, addresses in moved.items():
        assert addresses, f"no system call to {kind} was seen"
        assert all(start <= address < start + rig.staging.capacity_bytes for address in addresses)
