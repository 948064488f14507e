"""Compression takes staging memory twice, never more than there is, and nothing waits for ever (I3, I4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from offload_backend_disk.plugin import DISK

from offload_core.memory.staging_pool import Lease
from offload_core.memory.staging_size import ALIGNMENT_BYTES, StagingUse, smallest_pool_bytes, staging_problem
from offload_core.runtime.io_loop import IoLoop
from tests.core.tiers.test_compression import tier_config
from tests.support.transfer_rig import Rig, item

MIB = 1024 * 1024


@pytest.fixture
def make(io: IoLoop, tmp_path: Path) -> Iterator[Callable[[int, int, str], Rig]]:
    rigs: list[Rig] = []

    def make_rig(page_bytes: int, num_blocks: int, compression: str) -> Rig:
        rig = Rig(io, page_bytes=page_bytes, num_blocks=num_blocks)
        rig.kv_cache.bitwise_and_(3)  # so that it compresses
        rig.add_tier(tier_config(DISK, {"path": str(tmp_path / compression)}, compression))
        rig.start(smallest_pool_bytes(rig.largest_payload_bytes, [StagingUse(encodes=True)]))
        rigs.append(rig)
        return rig

    yield make_rig
    for rig in rigs:
        rig.finish()


@pytest.mark.parametrize("compression", ["zstd", "zstd-planes"])
def test_i4_the_smallest_pool_has_room_for_a_batch_beside_hung_stores(
    make: Callable[[int, int, str], Rig], compression: str
) -> None:
    rig = make(1_198_373, 8, compression)
    for number in range(8):
        assert rig.store_all(item(number, block=number)) == {number: True}
    assert rig.counted("store_raw_bytes", "tier") > 1.5 * rig.counted("store_bytes", "tier")
    wanted = rig.kv_cache.clone()
    rig.kv_cache.zero_()
    hung: list[Lease] = []
    while (lease := rig.staging.try_acquire(1, for_store=True)) is not None:
        hung.append(lease)
    rig.load(*(item(number, block=number) for number in range(8)), tier="tier")
    assert rig.result().status == "loaded"
    for lease in hung:
        lease.release()
    assert torch.equal(rig.kv_cache, wanted)
    assert rig.staging.used_bytes == 0


def test_jobs_with_more_bytes_than_the_pool_do_not_wait_for_each_other(make: Callable[[int, int, str], Rig]) -> None:
    rig = make(MIB, 32, "zstd-planes")
    for number in range(16):
        assert rig.store_all(item(number, block=number)) == {number: True}
    for _ in range(4):
        rig.load(*(item(number, block=16 + number) for number in range(16)), tier="tier")
    assert {result.status for result in rig.results(4).values()} == {"loaded"}
    assert torch.equal(rig.kv_cache[16:], rig.kv_cache[:16])
    assert rig.staging.used_bytes == 0


def test_staging_is_never_exceeded_and_dropped_objects_are_counted(make: Callable[[int, int, str], Rig]) -> None:
    rig = make(MIB, 32, "zstd")
    most: list[int] = []
    acquire = rig.staging.try_acquire

    def watched(nbytes: int, *, for_store: bool) -> Lease | None:
        lease = acquire(nbytes, for_store=for_store)
        most.append(rig.staging.used_bytes)
        return lease

    rig.staging.try_acquire = watched  # type: ignore[method-assign]  # to see every moment at which memory is taken
    results = rig.store_all(*(item(number, block=number) for number in range(32)))
    assert sum(results.values()) + rig.counted("store_dropped", "tier") == 32
    assert 0 < max(most) <= rig.staging.store_limit_bytes
    assert rig.staging.used_bytes == 0
    stored = [number for number, there in results.items() if there]
    assert stored
    rig.load(*(item(number, block=number) for number in stored), tier="tier")
    assert rig.result().status == "loaded"
    assert max(most) <= rig.staging.capacity_bytes


def test_every_tier_that_compresses_makes_the_smallest_pool_larger() -> None:
    uses = [[StagingUse(0.75, number < compressing) for number in range(2)] for compressing in range(3)]
    sizes = [smallest_pool_bytes(MIB, one) for one in uses]
    assert sizes[0] < sizes[1] < sizes[2]
    assert smallest_pool_bytes(MIB, [StagingUse(encodes=True)]) >= 2 * smallest_pool_bytes(MIB) - 2 * ALIGNMENT_BYTES
    problem = staging_problem(sizes[0], MIB, 256, uses[1])
    assert problem is not None
    assert (
        "objects of up to 1048576 bytes and staging shares of 0.75, 0.75 and 1 backends with compression or encryption"
        in problem
    )
    assert staging_problem(sizes[1], MIB, 256, uses[1]) is None
