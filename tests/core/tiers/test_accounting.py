"""A tier's counts of evictions, and of objects that nobody has read before their eviction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.tiers import accounting
from offload_core.tiers.accounting import TierAccounting
from offload_core.tiers.object_io import LoadEnd
from offload_core.tiers.storage import StoreEnd
from offload_core.tiers.tier import Tier
from tests.support.memory_backend import LIMITS, key, memory_tier
from tests.support.staged_objects import StagedObjects

SECONDS = 30
OPERATIONS = st.lists(  # so many on so few objects that each order of operations on an object happens
    st.tuples(st.sampled_from(["store", "load", "evict", "others evict"]), st.integers(0, 2)), min_size=30
)


def store(tier: TierAccounting, staged: Any, nbytes: int) -> None:
    tier.stored([staged], [StoreEnd(StoreOutcome.STORED, nbytes, False)], 0.01)


def load(tier: TierAccounting, staged: Any) -> None:
    tier.loaded([staged], LoadEnd([LoadOutcome.HIT], 1), 0.01)


@given(operations=OPERATIONS)
def test_evictions_and_those_never_read_are_those_of_an_oracle(operations: list[tuple[str, int]]) -> None:
    counters, medium = Counters(), StagedObjects()
    tier = TierAccounting("nvme", counters, False, None)
    unread: dict[int, int] = {}
    expected = dict.fromkeys(("evictions", "evictions_unread", "evictions_unread_bytes"), 0)
    for step, (operation, number) in enumerate(operations):
        staged = medium.staged(number)
        if operation == "store":
            store(tier, staged, nbytes=10 + step)
            unread[number] = 10 + step
        elif operation == "load":
            load(tier, staged)
            unread.pop(number, None)
        else:
            by_others = operation == "others evict"
            (tier.evicted_by_others if by_others else tier.evicted)([key(number)])
            expected["evictions"] += not by_others
            expected["evictions_unread"] += number in unread
            expected["evictions_unread_bytes"] += unread.pop(number, 0)
        staged.lease.release()
    counts = counters.take()
    assert {name: counts.get((name, "nvme"), 0) for name in expected} == expected


def test_of_too_many_unread_objects_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "_MAX_UNREAD", 3)
    counters, medium = Counters(), StagedObjects()
    tier = TierAccounting("nvme", counters, False, None)
    for number in (1, 2, 3, 1, 4):  # 1 is stored again, so 2 is the oldest
        store(tier, medium.staged(number), nbytes=100)
    tier.evicted([key(number) for number in (1, 2, 3, 4)])
    counts = counters.take()
    assert (counts["evictions", "nvme"], counts["evictions_unread", "nvme"]) == (4, 3)


@pytest.fixture
def tier(io: IoLoop, counters: Counters) -> Iterator[tuple[Tier, Any]]:
    config, made = memory_tier()
    tier = Tier(config, LIMITS, counters)
    io.submit(tier.open()).result(SECONDS)
    yield tier, made[0]
    made[0].faults = {}
    io.submit(tier.close()).result(SECONDS)


def test_every_call_is_in_a_histogram_whether_it_failed_or_not(
    io: IoLoop, counters: Counters, tier: tuple[Tier, Any]
) -> None:
    its, backend = tier
    medium = StagedObjects()

    def calls() -> None:
        io.submit(its.store([medium.sealed(1)])).result(SECONDS)
        io.submit(its.lookup([key(1)])).result(SECONDS)
        io.submit(its.load([medium.staged(1)])).result(SECONDS)

    calls()
    backend.faults = dict.fromkeys(("store", "contains", "load_into"), OSError("gone"))
    calls()
    counts: dict[str, float] = {}
    for (name, of), count in counters.take_histograms().items():
        assert of == its.name
        if not name.endswith(":sum"):
            counts[name.split(":")[0]] = counts.get(name.split(":")[0], 0) + count
        else:
            assert count > 0
    assert counts == {"store_seconds": 2, "lookup_seconds": 2, "load_seconds": 2}
