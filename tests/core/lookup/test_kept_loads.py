"""The index of kept objects: the budget of a step, and loads that are given back in time and only once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from offload_core.config.loading import load_config
from offload_core.lookup.kept_loads import KeptLoads, kept_limits
from offload_core.planning.chunk_keys import ChunkRef
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.tiers.opening import close_tiers, open_tiers

BUDGET, LIMIT, OBJECT = 40, 100, 10


def ref(number: int) -> ChunkRef:
    return ChunkRef("pack", bytes([number]))


def refs(*numbers: int) -> list[ChunkRef]:
    return list(map(ref, numbers))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def kept_loads(clock: Clock | None = None, *, ranks: int = 1, budget: int = BUDGET) -> KeptLoads:
    index = KeptLoads(ranks, budget, {"ram": LIMIT}, clock or Clock())
    index.object_bytes = {"pack": OBJECT}
    return index


def keep(index: KeptLoads, job_id: int, *numbers: int) -> None:
    assert index.begins(job_id, "ram", refs(*numbers))
    index.reported({job_id: 1})
    index.ended(job_id)


def test_the_budget_of_a_step_is_taken_by_its_loads_and_renewed_with_the_next_step() -> None:
    index = kept_loads()
    keep(index, 1, 1, 2, 3, 4, 5)
    assert not index.try_use("ram", refs(1, 2, 3, 4, 5)), "50 bytes do not fit into 40"
    assert index.try_use("ram", refs(1, 2, 3))
    assert not index.try_use("ram", refs(4, 5)), "10 bytes are left"
    assert index.try_use("ram", refs(4))
    index.end_step()
    assert index.try_use("ram", refs(2, 3, 4, 5))


def test_nothing_is_kept_without_a_budget_or_on_a_tier_that_does_not_lend() -> None:
    assert not kept_loads(budget=0).begins(1, "ram", refs(1))
    assert not kept_loads().begins(1, "disk", refs(1))
    assert not kept_loads().begins(1, "ram", refs(*range(11))), "110 bytes are more than the limit"


def test_a_chunk_that_is_not_kept_excludes_the_load() -> None:
    index = kept_loads()
    keep(index, 1, 1, 2)
    assert not index.try_use("ram", refs(1, 2, 3))
    assert not index.try_use("other", refs(1, 2))
    assert not index.try_use("ram", [])


def test_a_load_is_kept_only_once_every_rank_has_reported_it() -> None:
    index = kept_loads(ranks=2)
    index.begins(1, "ram", refs(1))
    index.begins(2, "ram", refs(2))
    index.reported({1: 2, 2: 1})
    assert not index.try_use("ram", refs(1)), "the load has not ended"
    index.ended(1)
    index.ended(2)  # the other rank got the object without a loan
    assert index.try_use("ram", refs(1))
    assert not index.try_use("ram", refs(2))
    assert index.end_step() == [2]


def test_a_report_after_the_end_of_the_request_gives_the_objects_back() -> None:
    index = kept_loads()
    index.begins(1, "ram", refs(1))
    index.ended(1)
    index.reported({1: 1})
    assert index.end_step() == [1]
    assert not index.try_use("ram", refs(1))


def test_the_longest_unused_load_makes_room_for_a_new_one() -> None:
    index = kept_loads()
    keep(index, 1, 1, 2, 3, 4)
    keep(index, 2, 5, 6, 7, 8)
    assert index.try_use("ram", refs(1))
    keep(index, 3, 9, 10, 11, 12)
    assert index.end_step() == [2]
    assert index.try_use("ram", refs(1, 9))


def test_objects_that_nobody_uses_for_a_minute_are_given_back() -> None:
    clock = Clock()
    index = kept_loads(clock)
    keep(index, 1, 1)
    keep(index, 2, 2)
    clock.now = 59
    assert index.try_use("ram", refs(1))
    assert index.end_step() == []
    clock.now = 61
    assert index.end_step() == [2]
    clock.now = 120
    assert index.end_step() == [1]


def test_an_object_that_has_left_its_tier_takes_its_load_with_it() -> None:
    index = kept_loads()
    keep(index, 1, 1, 2)
    index.gone("ram", "pack", ref(2).chunk_hash)
    index.gone("ram", "pack", ref(7).chunk_hash)
    assert not index.try_use("ram", refs(1))
    assert index.end_step() == [1]


def test_an_object_that_leaves_its_tier_before_its_load_ends_is_not_kept() -> None:
    """As when the process that lends its memory has died, and the news is faster than the end of the load."""
    index = kept_loads()
    assert index.begins(1, "ram", refs(1, 2))
    index.reported({1: 1})
    index.gone("ram", "pack", bytes([2]))
    index.ended(1)
    assert not index.try_use("ram", refs(1))
    assert index.end_step() == [1]


def test_an_object_that_has_left_its_tier_takes_every_load_that_has_it() -> None:
    index = kept_loads()
    keep(index, 1, 1, 2)
    keep(index, 2, 1, 3)
    index.gone("ram", "pack", bytes([1]))
    assert sorted(index.end_step()) == [1, 2]


def test_the_chunks_of_two_adapters_are_not_taken_for_each_other() -> None:
    index = kept_loads()
    for job_id, adapter in enumerate(("old", "new")):
        chunks = [ref(1)._replace(adapter=adapter)]
        assert not index.try_use("ram", chunks)
        index.begins(job_id, "ram", chunks)
        index.reported({job_id: 1})
        index.ended(job_id)
        assert index.try_use("ram", chunks)
    index.gone("ram", "pack", ref(1).chunk_hash)
    assert sorted(index.end_step()) == [0, 1]


def test_a_reset_gives_everything_back_also_of_loads_that_have_not_ended() -> None:
    index = kept_loads(ranks=2)
    index.begins(1, "ram", refs(1))
    index.reported({1: 2})
    index.ended(1)
    index.begins(2, "ram", refs(2))
    index.reported({2: 1})
    index.begins(3, "ram", refs(3))
    index.clear()
    assert not index.try_use("ram", refs(1))
    index.reported({2: 1, 3: 1})
    assert sorted(set(index.end_step())) == [1, 2, 3]


def test_touches_of_kept_objects_are_repeated_in_their_order_after_they_were_given_back() -> None:
    index = kept_loads()
    keep(index, 1, 1, 2, 3)
    index.touched([(ref(3), True), (ref(2), False), (ref(9), False)])
    index.touched([(ref(1), False), (ref(3), False)])
    assert index.take_touches() == []
    index.gone("ram", "pack", ref(1).chunk_hash)
    index.end_step()
    assert index.take_touches() == [(ref(2), False), (ref(1), False), (ref(3), False)]
    assert index.take_touches() == []


def test_the_limit_is_half_of_the_capacity_for_all_ranks_that_share_it(io: IoLoop, tmp_path: Path) -> None:
    backends: list[dict[str, Any]] = [
        {"name": "ram", "type": "cpu", "capacity": "64MiB"},
        {"name": "disk", "type": "disk", "path": str(tmp_path), "capacity": "1GiB"},
    ]
    for mode, limit in (("engine", 16 << 20), ("off", 32 << 20)):
        config = load_config({"backends": backends, "io_process": mode})
        tiers = open_tiers(config, io, Counters(), only_shared=True)
        try:
            assert kept_limits(config, tiers, num_ranks=2) == {"ram": limit}
        finally:
            close_tiers(tiers, io)


class KeptLoadsMachine(RuleBasedStateMachine):
    """Two workers that obey the index, against it: whatever it uses, both of them hold."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.index = kept_loads(self.clock, ranks=2)
        self.jobs = 0
        self.open: dict[int, list[ChunkRef]] = {}
        self.held: tuple[dict[int, list[ChunkRef]], ...] = ({}, {})
        self.used_bytes = 0

    @rule(numbers=st.sets(st.integers(0, 7), min_size=1, max_size=6))
    def begin(self, numbers: set[int]) -> None:
        self.jobs += 1
        if self.index.begins(self.jobs, "ram", refs(*numbers)):
            self.open[self.jobs] = refs(*numbers)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), ranks=st.sets(st.integers(0, 1)))
    def load_ends(self, data: st.DataObject, ranks: set[int]) -> None:
        job = data.draw(st.sampled_from(sorted(self.open)))
        for rank in ranks:
            self.held[rank][job] = self.open[job]
        self.index.reported(Counter({job: len(ranks)}))
        self.index.ended(job)
        del self.open[job]

    @precondition(lambda self: self.open)
    @rule(data=st.data(), rank=st.integers(0, 1))
    def abort_before_the_report(self, data: st.DataObject, rank: int) -> None:
        job = data.draw(st.sampled_from(sorted(self.open)))
        self.index.ended(job)
        self.held[rank][job] = self.open.pop(job)
        self.index.reported({job: 1})

    @rule(numbers=st.sets(st.integers(0, 7), min_size=1, max_size=4))
    def use(self, numbers: set[int]) -> None:
        if self.index.try_use("ram", refs(*numbers)):
            self.used_bytes += OBJECT * len(numbers)
            for rank in self.held:
                assert set(refs(*numbers)) <= {one for kept in rank.values() for one in kept}

    @rule(number=st.integers(0, 7))
    def evict(self, number: int) -> None:
        self.index.gone("ram", "pack", ref(number).chunk_hash)

    @rule(seconds=st.sampled_from([0, 1, 40]))
    def step(self, seconds: int) -> None:
        self.clock.now += seconds
        for job in self.index.end_step():
            for rank in self.held:
                rank.pop(job, None)
        self.used_bytes = 0
        assert all(sum(map(len, rank.values())) * OBJECT <= LIMIT for rank in self.held)

    @rule()
    def reset(self) -> None:
        self.index.clear()
        self.open.clear()

    @invariant()
    def the_budget_holds(self) -> None:
        assert self.used_bytes <= BUDGET

    def teardown(self) -> None:
        self.index.clear()
        self.step(0)
        assert self.held == ({}, {}), "something is kept for ever"


KeptLoadsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestKeptLoadsMachine = KeptLoadsMachine.TestCase
