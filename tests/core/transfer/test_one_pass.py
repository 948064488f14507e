"""Bytes on their way to tiers and back: hashed once, and written to files from the staging memory itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from offload_core.memory.block_copier import COPY_BYTES
from offload_core.objects import format as object_format
from offload_core.runtime.io_loop import IoLoop
from offload_core.transfer.stores.pending_store import StoreResult
from tests.support.memory_backend import key
from tests.support.transfer_rig import PACK, SECONDS, Rig, disk_tier, item

PAGE_BYTES = 64 * 1024


@pytest.fixture
def rig(io: IoLoop) -> Iterator[Rig]:
    rig = Rig(io, page_bytes=PAGE_BYTES)
    yield rig
    rig.finish()


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each part of a payload that was hashed."""
    sizes: list[int] = []
    make = xxhash.xxh3_128

    class Counted:
        def __init__(self) -> None:
            self._state = make()

        def update(self, data: memoryview) -> None:
            sizes.append(len(data))
            self._state.update(data)

        def digest(self) -> bytes:
            return self._state.digest()

    monkeypatch.setattr(xxhash, "xxh3_128", Counted)
    return sizes


def test_a_store_is_hashed_once_for_all_tiers_and_a_load_is_checked_once(
    rig: Rig, hashed: list[int], tmp_path: Path
) -> None:
    rig.add_memory_tier("memory")
    rig.add_tier(disk_tier("disk", str(tmp_path)))
    rig.start()
    rig.store_all(item(1, block=1))
    assert sum(hashed) == PAGE_BYTES
    rig.load(item(1, block=9), tier="disk")
    assert rig.result().status == "loaded"
    assert sum(hashed) == 2 * PAGE_BYTES


def test_an_object_that_its_tier_does_not_seal_is_hashed_part_by_part_with_its_copy(
    io: IoLoop, hashed: list[int]
) -> None:
    page_bytes = 3 * COPY_BYTES + 4096
    rig = Rig(io, page_bytes=page_bytes, num_blocks=4)
    memory = rig.add_memory_tier()
    rig.start()
    rig.store_all(item(1, block=1))
    assert [nbytes for nbytes in hashed if nbytes] == [COPY_BYTES, COPY_BYTES, COPY_BYTES, 4096]
    (stored,) = memory.objects.values()
    object_format.verify(memoryview(stored), key(1, PACK))
    rig.finish()


def test_an_object_that_no_header_can_name_is_dropped(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    memory = rig.add_memory_tier()
    rig.start()
    nameless = replace(item(1, block=1), key=key(1, PACK)._replace(chunk_hash=bytes(65)))
    rig.engine.submit_stores([nameless])
    assert rig.engine.drain_stores(SECONDS)
    assert rig.engine.take_store_results() == [StoreResult(nameless.key, stored=False)]
    assert not memory.objects
    assert "its chunk hash has 65 bytes" in caplog.text


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
    assert sum(hashed) == 2 * PAGE_BYTES, "sealed at the store, checked at the load"


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
