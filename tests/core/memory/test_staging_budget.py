"""Staging never exceeds its budget under any load: the test counts every lease of a transfer engine."""

from __future__ import annotations

import random

import pytest

from offload_core.api.memory.pinned_memory import HostPinning
from offload_core.memory.staging_pool import Lease, StagingPool
from offload_core.memory.staging_size import ALIGNMENT_BYTES
from offload_core.runtime.io_loop import IoLoop
from tests.support.transfer_rig import SECONDS, Rig, item

PAGE_BYTES = 96 * 1024
NUM_BLOCKS = 24


def is_held(lease: Lease) -> bool:
    try:
        return lease.view is not None
    except RuntimeError:
        return False


class CountedPool(StagingPool):
    """Counts the leased bytes by its leases alone, at each new lease."""

    def __init__(self, capacity_bytes: int, store_share: float, pinning: HostPinning | None = None) -> None:
        super().__init__(capacity_bytes, store_share, pinning)
        self.budget_bytes = capacity_bytes
        self.leases: list[tuple[Lease, int]] = []
        self.most_bytes = 0
        self.problems: list[str] = []

    def try_acquire(self, nbytes: int, *, for_store: bool) -> Lease | None:
        lease = super().try_acquire(nbytes, for_store=for_store)
        if lease is not None:
            start = lease.tensor.data_ptr() - self.tensor.data_ptr()
            # Counted after the new lease: the previous lease of its memory has been released.
            self.leases = others = [(other, at) for other, at in self.leases if is_held(other)]
            if any(at < start + nbytes and start < at + other.nbytes for other, at in others):
                self.problems.append(f"the lease of {nbytes} bytes at {start} overlaps another")
            if start < 0 or start + nbytes > self.budget_bytes:
                self.problems.append(f"the lease of {nbytes} bytes at {start} is not within the budget")
            self.leases = [*others, (lease, start)]
            leased = sum(-(-held.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for held, _ in self.leases)
            self.most_bytes = max(self.most_bytes, leased)
        return lease


@pytest.mark.parametrize("seed", range(3))
def test_staging_never_exceeds_its_budget_under_random_loads_stores_and_cancellations(io: IoLoop, seed: int) -> None:
    chooser = random.Random(seed)
    rig = Rig(io, page_bytes=PAGE_BYTES, num_blocks=NUM_BLOCKS)
    for name in ("memory", "other"):
        rig.add_memory_tier(name, io_threads=4)
    budget = 40 * (PAGE_BYTES + ALIGNMENT_BYTES)
    engine = rig.start(budget, CountedPool)
    pool = rig.staging
    assert isinstance(pool, CountedPool)
    loads: set[int] = set()
    ended: set[int] = set()
    for _ in range(250):
        numbers = chooser.sample(range(NUM_BLOCKS), chooser.randint(1, NUM_BLOCKS))
        match chooser.choice(("store", "store", "load", "load", "cancel", "poll")):
            case "store":
                engine.submit_stores([item(chooser.randrange(100), block=number) for number in numbers])
            case "load":
                names = chooser.sample(range(100), len(numbers))
                objects = [item(name, block) for name, block in zip(names, numbers, strict=True)]
                loads.add(rig.load(*objects, tier=chooser.choice(("memory", "other"))))
            case "cancel" if loads - ended:
                engine.cancel_load(chooser.choice(sorted(loads - ended)))
            case _:
                ended |= {result.job_id for result in engine.poll()}
    assert engine.drain_stores(SECONDS)
    rig.results(len(loads - ended))
    rig.all_leases_are_back()
    assert pool.problems == []
    assert budget / 8 < pool.most_bytes <= budget, "there was a load, and the budget was kept"
    rig.finish()
