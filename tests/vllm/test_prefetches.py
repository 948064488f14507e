"""The prefetches of a worker: the report follows the stores of promoted objects, but not for ever."""

from __future__ import annotations

import pytest

from offload_core.api.keys import ObjectKey
from offload_core.planning.chunk_keys import ChunkRef
from offload_core.planning.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner
from offload_core.transfer.loads import LoadResult, LoadStatus
from offload_core.vllm.metadata import Prefetch, StepReport
from offload_core.vllm.worker import prefetches as module
from offload_core.vllm.worker.prefetches import WorkerPrefetches

BLOCK = 16
REF = ChunkRef("full-u16", b"hash")


def key(ref: ChunkRef) -> ObjectKey:
    return ObjectKey("namespace", ref.pack, ref.chunk_hash)


def ref(one: ObjectKey) -> ChunkRef:
    return ChunkRef(one.pack, one.chunk_hash)


@pytest.fixture
def worker() -> WorkerPrefetches:
    groups = [GroupGeometry(0, BLOCK, HitPolicy("full"))]
    planner = HybridOffloadPlanner.build(groups, hash_block_size=BLOCK, max_model_len=4096, hybrid_chunk_size=BLOCK)
    return WorkerPrefetches(planner)


def load(worker: WorkerPrefetches, *, last: bool, status: LoadStatus = "loaded") -> StepReport:
    report = StepReport()
    job = worker.begin(Prefetch(-1, "disk", (REF,), last), key)
    assert [item.key for item in job.objects] == [key(REF)]
    assert not any(part.block_ids for part in job.objects[0].blocks)
    failed = () if status == "loaded" else (key(REF),)
    assert worker.load_ended(LoadResult(-1, status, failed), report, ref)
    assert not worker.load_ended(LoadResult(-1, status), report, ref), "only once"
    return report


def test_the_last_batch_is_reported_after_the_stores(worker: WorkerPrefetches) -> None:
    report = load(worker, last=True)
    worker.report(report, stores_pending=True)
    assert not report.prefetches_ended
    worker.report(report, stores_pending=False)
    assert not worker.is_storing
    assert report.prefetches_ended == {-1: 1}
    assert not report.prefetches_failed


def test_other_batches_are_reported_at_once(worker: WorkerPrefetches) -> None:
    report = load(worker, last=False)
    worker.report(report, stores_pending=True)
    assert report.prefetches_ended == {-1: 1}


def test_stores_that_never_end_hold_no_report_back(worker: WorkerPrefetches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LONGEST_STORE_SECONDS", 0.0)
    report = load(worker, last=True)
    worker.report(report, stores_pending=True)
    assert report.prefetches_ended == {-1: 1}


def test_a_failed_load_is_reported_with_its_chunks(worker: WorkerPrefetches) -> None:
    report = load(worker, last=True, status="failed")
    worker.report(report, stores_pending=False)
    assert report.prefetches_failed == {-1}
    assert report.failed_chunks == {("disk", REF)}
    assert report.aggregate(StepReport()).prefetches_failed == {-1}
    assert report.aggregate(report).prefetches_ended == {-1: 2}
