"""Copies between a device and memory that a tier in the I/O process lends, which is pinned piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offload_core.io_process import lent_mapping
from offload_core.memory.canonical import CanonicalKVCaches
from offload_core.memory.device.pinned_pieces import PinnedPieces
from offload_core.memory.device.stream_copier import StreamBlockCopier
from offload_core.runtime.io_loop import IoLoop
from offload_core.transfer.loads import LoadJob
from offload_core.vllm.worker.batched_copy import SwapBlocksBatch
from tests.support.accelerator import DEVICE, StreamControl
from tests.support.lending_rig import LendingRig
from tests.support.transfer_rig import SECONDS, item

COUNT = 8
JOB = 1000


@pytest.fixture
def rig(control: StreamControl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LendingRig]:
    monkeypatch.setattr(lent_mapping, "PIECE_BYTES", 3 * 4096)  # borders within objects
    pinned = PinnedPieces(control)
    copy = SwapBlocksBatch(control.swap_blocks_batch, torch.int64)

    def copier(caches: CanonicalKVCaches) -> StreamBlockCopier:
        return StreamBlockCopier(caches, 2 * COUNT * 8192, copy, pinned)

    io = IoLoop.acquire()
    rig = LendingRig(
        io, tmp_path, "engine", capacity_objects=2 * COUNT, make_copier=copier, device=DEVICE, pinning=pinned
    )
    rig.step_until(lambda: rig.tiers[0].lending.is_possible)
    yield rig
    rig.close()
    io.release()


def store(rig: LendingRig, first: int) -> None:
    objects = [item(number, number) for number in range(first, first + COUNT)]
    rig.announce(*objects)
    assert set(rig.store_all(*objects).values()) == {True}


def load_job(first: int, block: int, *, keep: bool = False) -> LoadJob:
    return LoadJob(JOB, "cpu", tuple(item(first + place, block + place) for place in range(COUNT)), keep=keep)


def test_objects_pass_through_lent_memory_alone(rig: LendingRig, control: StreamControl) -> None:
    before = rig.kv_cache.cpu()
    for first in (0, COUNT):
        store(rig, first)
    rig.engine.submit_load(load_job(3, 40))
    assert rig.result().status == "loaded"
    assert torch.equal(rig.kv_cache.cpu()[40 : 40 + COUNT], before[3 : 3 + COUNT])
    assert rig.pool.leases == 0, "staging memory is used"


def test_a_store_and_a_load_wait_for_their_streams_and_the_engine_does_not(
    rig: LendingRig, control: StreamControl
) -> None:
    before = rig.kv_cache.cpu()
    copier = rig.copier
    objects = [item(number, number) for number in range(COUNT)]
    rig.announce(*objects)
    with control.held(copier._store_stream):
        rig.engine.submit_stores(objects)
        rig.kv_cache[:COUNT].fill_(0x11)
        assert not rig.engine.drain_stores(0.1)
    assert rig.engine.drain_stores(SECONDS)
    assert set(rig.store_results().values()) == {True}
    with control.held(copier._load_stream):
        rig.engine.submit_load(load_job(0, 40))
        rig.step_until(lambda: bool(rig.engine._loads._copying))
        assert not rig.engine.poll()
    assert rig.result().status == "loaded"
    assert torch.equal(rig.kv_cache.cpu()[40 : 40 + COUNT], before[:COUNT])
    assert rig.pool.leases == 0


def test_the_engine_reads_objects_at_hand_after_their_copies_and_they_stay_lent_until_then(
    rig: LendingRig, control: StreamControl
) -> None:
    before = rig.kv_cache.cpu()
    store(rig, 0)
    rig.engine.submit_load(load_job(0, 40, keep=True))
    assert rig.result().kept
    with control.held(rig.copier._load_stream):
        rig.engine.copy_kept("cpu", load_job(0, 50).objects)
        read_by_the_engine = rig.kv_cache[50 : 50 + COUNT].clone()
        rig.engine.give_back([JOB])
        rig.engine.poll()
        assert rig.engine._loads._copying
    assert torch.equal(read_by_the_engine.cpu(), before[:COUNT])
    rig.step_until(lambda: not rig.engine._loads._copying)


def test_torchs_copies_use_staging_memory(control: StreamControl, tmp_path: Path) -> None:
    pinned = PinnedPieces(control)
    io = IoLoop.acquire()
    rig = LendingRig(
        io, tmp_path, "engine", capacity_objects=2 * COUNT, device=DEVICE, pinning=pinned,
        make_copier=lambda caches: StreamBlockCopier(caches, 2 * COUNT * 8192, None, pinned),
    )  # fmt: skip
    store(rig, 0)
    assert rig.pool.leases == COUNT
    rig.close()
    io.release()
