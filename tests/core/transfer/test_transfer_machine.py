"""Random work on three tiers that hang, fail, forget and recover: budgets, leases, results and bytes (I1 to I4).

One machine has a KV cache in host memory. The copies of the other one go on after their calls, as on a device.

Blocks 0 to 5 hold the stored data, under keys of the same numbers. Loads go to the other blocks. Between loads these
hold a pattern that nothing may change.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from offload_core.api.keys import ObjectKey
from offload_core.memory.canonical import CanonicalKVCaches
from offload_core.objects.format import HEADER_BYTES
from offload_core.runtime.io_loop import IoLoop
from tests.support.held_copier import HeldCopier, copier
from tests.support.logged_errors import LoggedErrors
from tests.support.memory_backend import key
from tests.support.transfer_rig import PACK, SECONDS, Rig, WatchedCopier, item, number_of

NUMBERS = range(6)
TARGETS = range(6, 12)
PATTERN = 0x5A
PAGE_BYTES = 64 << 10
NOTHING = bytes([PATTERN]) * PAGE_BYTES
STAGING_BYTES = 2 << 20
STAGING_SHARE = 0.4  # six objects, of either half
CALLS = ("store", "load_into")
FAULTS: dict[str, BaseException] = {"an error": OSError("gone"), "a cancellation": asyncio.CancelledError()}
JOBS = ("jobs", "jobs_retired", "jobs_done", "jobs_failed", "jobs_timed_out", "jobs_cancelled")
GAUGES = ("draining_leases", "pending_stores")
POLICIES = ("every", "second-touch", "never")


class Remembering(dict[ObjectKey, bytes]):
    """A medium's objects, and the numbers of all that it has ever held."""

    def __init__(self) -> None:
        super().__init__()
        self.ever: set[int] = set()

    def update(self, *args: Any, **kwargs: Any) -> None:
        new = dict(*args, **kwargs)
        self.ever = self.ever | {int.from_bytes(name.chunk_hash, "big") for name in new}  # others iterate over the set
        super().update(new)


class Transfers(RuleBasedStateMachine):
    """Random operations on three tiers.

    Oracle: every offered store and every load has one result. A load brings the bytes of the stored block. No limit is
    exceeded at any time, and a hung call delays no result beyond its deadline. In the end no memory is held, every job
    has one verdict, and every tier works.
    """

    make_copier: Callable[[CanonicalKVCaches], WatchedCopier] = WatchedCopier

    def __init__(self) -> None:
        super().__init__()
        self.io = IoLoop.acquire()
        self.errors = LoggedErrors()
        self.rig = Rig(self.io, page_bytes=PAGE_BYTES, num_blocks=12, make_copier=type(self).make_copier)
        self.blocks = self.rig.kv_cache.numpy()  # torch's threads would wait for each other on a busy machine
        self.blocks[TARGETS.start :] = PATTERN
        self.uses: Counter[int] = Counter()
        self.offered: Counter[int] = Counter()
        self.results: Counter[int] = Counter()
        self.loads: dict[int, tuple[list[int], list[int]]] = {}
        self.free = list(TARGETS)

    @initialize(
        policies=st.lists(st.sampled_from(POLICIES), min_size=3, max_size=3),
        promote=st.lists(st.booleans(), min_size=3, max_size=3),
        load_timeout=st.sampled_from([0.02, SECONDS]),
        store_timeout=st.sampled_from([0.02, SECONDS]),
        breaker_failures=st.sampled_from([2, 1000]),
    )
    def start(
        self,
        policies: list[str],
        promote: list[bool],
        load_timeout: float,
        store_timeout: float,
        breaker_failures: int,
    ) -> None:
        self.stores_end_by_themselves = store_timeout < SECONDS
        names = ("fast", "middle", "slow")
        for name, policy, keeps in zip(names, policies, promote, strict=True):
            self.rig.add_memory_tier(
                name,
                write_policy=policy,
                promote=keeps,
                io_threads=2,
                load_timeout_seconds=load_timeout,
                store_timeout_seconds=store_timeout,
                breaker_failures=breaker_failures,
                breaker_pause_seconds=0.005,
                breaker_max_pause_seconds=0.02,
                staging_share=STAGING_SHARE,
            ).objects = Remembering()
        self.rig.start(STAGING_BYTES)

    @rule(numbers=st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=4, unique=True))
    def store(self, numbers: Sequence[int]) -> None:
        self.rig.engine.submit_stores([item(number, block=number) for number in numbers])
        self.offered.update(numbers)
        self.uses.update(numbers)

    @rule(tier=st.integers(0, 2), numbers=st.lists(st.sampled_from(NUMBERS), max_size=4, unique=True))
    def load(self, tier: int, numbers: Sequence[int]) -> None:
        targets, self.free = self.free[: len(numbers)], self.free[len(numbers) :]
        numbers = list(numbers[: len(targets)])
        objects = [item(number, block=block) for number, block in zip(numbers, targets, strict=True)]
        self.loads[self.rig.load(*objects, tier=self.rig.tiers[tier].name)] = (numbers, targets)
        self.uses.update(numbers)

    @rule(place=st.integers(0, 5))
    def cancel(self, place: int) -> None:
        if self.loads:  # the ended loads depend on time, so this is no precondition
            self.rig.engine.cancel_load(sorted(self.loads)[place % len(self.loads)])

    @rule(tier=st.integers(0, 2), call=st.sampled_from(CALLS))
    def hang(self, tier: int, call: str) -> None:
        self.backend(tier).gates[call].shut()

    @rule(tier=st.integers(0, 2))
    def recover(self, tier: int) -> None:
        for call in CALLS:
            self.backend(tier).gates[call].open()
        self.backend(tier).faults = {}

    @rule(tier=st.integers(0, 2), call=st.sampled_from(CALLS), fault=st.sampled_from(sorted(FAULTS)))
    def fail(self, tier: int, call: str, fault: str) -> None:
        self.backend(tier).faults = {call: FAULTS[fault]}

    @rule(tier=st.integers(0, 2), number=st.sampled_from(NUMBERS), lost=st.booleans())
    def lose_or_damage(self, tier: int, number: int, lost: bool) -> None:
        objects = self.backend(tier).objects
        content = objects.pop(key(number, PACK), None)
        if content is not None and not lost:
            objects[key(number, PACK)] = content[:-1] + bytes([content[-1] ^ 1])

    @rule(seconds=st.sampled_from([0.0, 0.005, 0.03]))
    def step(self, seconds: float) -> None:
        self.rig.engine.wait_for_arrival(seconds)
        self.poll()

    @rule()
    def every_store_has_its_result_by_its_deadline(self) -> None:
        if self.stores_end_by_themselves:  # although calls hang
            self.step_until(lambda: self.results == self.offered)

    def step_until(self, done: Callable[[], bool]) -> None:
        limit = time.monotonic() + SECONDS
        while not done():
            assert time.monotonic() < limit, "the engine has stepped for long enough"
            self.step(0.01)

    def content(self, block: int) -> bytes:
        return bytes(self.blocks[block].tobytes())

    def backend(self, tier: int) -> Any:
        return self.rig.backends[self.rig.tiers[tier].name]

    def poll(self) -> None:
        for result in self.rig.engine.poll():
            numbers, targets = self.loads.pop(result.job_id)
            assert {number_in(name) for name in result.failed_keys} <= set(numbers)
            for number, block in zip(numbers, targets, strict=True):
                arrived = self.content(block) == self.content(number)
                if result.status == "loaded":
                    assert arrived, f"I1: {number} was loaded and is something else"
                assert arrived or self.content(block) == NOTHING, "I1: neither the object nor what was there"
                self.blocks[block] = PATTERN  # the block belongs to another request now
            self.free += targets
        for stored in self.rig.engine.take_store_results():
            number = number_of(stored)
            self.results[number] += 1
            assert self.results[number] <= self.offered[number], "a store has two results"
            assert not stored.stored or any(number in self.ever(tier) for tier in range(3))

    def ever(self, tier: int) -> set[int]:
        objects = self.backend(tier).objects
        assert isinstance(objects, Remembering)
        return objects.ever

    @invariant()
    def budgets_are_kept(self) -> None:
        if not self.rig.tiers:
            return
        staging, engine = self.rig.staging, self.rig.engine
        assert 0 <= staging.used_bytes <= staging.capacity_bytes
        assert 0 <= staging.store_bytes <= staging.store_limit_bytes
        for share in engine._shares.values():
            assert 0 <= share.loads.held_bytes <= share.loads.limit_bytes
            assert 0 <= share.stores.held_bytes <= share.stores.limit_bytes < staging.store_limit_bytes

    @invariant()
    def pending_stores_have_their_memory(self) -> None:
        if not self.rig.tiers:
            return
        stores = self.rig.engine._stores
        with stores._lock:
            batches = [batch for writer in stores._writers for batch in writer._job_of]
            for store in (store for batch in batches for store in batch.items):
                assert len(store.staged.lease.view) > PAGE_BYTES, "I3"  # raises when it was released
            jobs = [job for writer in stores._writers for job in writer._job_of.values()]
            assert [job for job in self.rig.engine.jobs.live if job.kind == "store" and job not in jobs] == []

    @invariant()
    def no_gauge_is_negative(self) -> None:
        for tier in self.rig.tiers:
            assert all(self.rig.counted(gauge, tier.name, keep=True) >= 0 for gauge in GAUGES)

    @invariant()
    def no_block_changes_without_a_load(self) -> None:
        assert all(self.content(block) == NOTHING for block in self.free), "I2"

    @invariant()
    def policies_are_kept(self) -> None:
        for tier, its in enumerate(self.rig.tiers):
            if its.config.write_policy == "never":
                assert self.ever(tier) == set()
            if its.config.write_policy == "second-touch":
                assert all(self.uses[number] > 1 for number in self.ever(tier))

    @invariant()
    def nothing_unexpected_has_happened(self) -> None:
        assert self.errors.messages == []

    def teardown(self) -> None:
        try:
            if self.rig.tiers:
                self.everything_ends_and_works_again()
        finally:
            self.errors.stop()
            self.rig.finish()
            self.io.release()

    def everything_ends_and_works_again(self) -> None:
        for tier in range(3):
            self.recover(tier)
        self.let_copies_go()
        self.step_until(lambda: not self.loads)
        assert self.rig.engine.drain_stores(SECONDS)
        self.step_until(lambda: self.rig.staging.used_bytes == 0)
        self.poll()
        assert self.results == self.offered, "every store has one result"
        self.every_job_has_one_verdict()
        assert self.rig.staging.store_bytes == 0
        for share in self.rig.engine._shares.values():
            assert (share.stores.held_bytes, share.loads.held_bytes) == (0, 0)
        for tier, its in enumerate(self.rig.tiers):
            its.limits = its.limits.model_copy(
                update={"load_timeout_seconds": SECONDS, "store_timeout_seconds": SECONDS}
            )
            self.is_used_again(tier)
            if its.config.write_policy != "never":
                self.backend(tier).objects.clear()
                self.stores_and_loads(tier, NUMBERS[:2])
        self.poll()
        self.nothing_unexpected_has_happened()
        self.policies_are_kept()

    def let_copies_go(self) -> None:
        """Let copies on a device happen at once from now on."""

    def every_job_has_one_verdict(self) -> None:
        self.step_until(lambda: not self.rig.engine.jobs.live)
        for tier in self.rig.tiers:
            counts = {name: self.rig.counted(name, tier.name) for name in (*JOBS, *GAUGES)}
            assert [counts.pop(gauge) for gauge in GAUGES] == [0, 0]
            jobs, retired, *verdicts = counts.values()
            assert jobs == retired == sum(verdicts), counts

    def is_used_again(self, tier: int) -> None:
        """Store and load until the tier's breaker is closed."""
        limit = time.monotonic() + SECONDS
        while not self.rig.tiers[tier].health.available:
            assert time.monotonic() < limit, "the breaker stays open"
            self.store(NUMBERS[:1])
            self.load(tier, NUMBERS[:1])
            self.step_until(lambda: not self.loads)
            assert self.rig.engine.drain_stores(SECONDS)

    def stores_and_loads(self, tier: int, numbers: Iterable[int]) -> None:
        for number in numbers:
            for _ in range(2):
                self.store([number])
                assert self.rig.engine.drain_stores(SECONDS)
            self.rig.counters.take()
            self.load(tier, [number])
            self.step_until(lambda: not self.loads)
            assert self.rig.counted("load_hits", self.rig.tiers[tier].name) == 1
            assert self.rig.engine.drain_stores(SECONDS)
            content = self.backend(tier).objects[key(number, PACK)]
            assert content[HEADER_BYTES:][:PAGE_BYTES] == self.content(number)
        assert self.rig.staging.used_bytes == 0


class TransfersOnDevice(Transfers):
    """The same where copies begin at a call and happen later, in any order of the two streams."""

    make_copier = HeldCopier

    @rule(stores=st.integers(0, 3), loads=st.integers(0, 3))
    def copies_happen(self, stores: int, loads: int) -> None:
        copier(self.rig).stores.run(stores)
        copier(self.rig).loads.run(loads)

    def let_copies_go(self) -> None:
        copier(self.rig).let_go()


def number_in(name: ObjectKey) -> int:
    return int.from_bytes(name.chunk_hash, "big")


TestTransfers = Transfers.TestCase
TestTransfersOnDevice = TransfersOnDevice.TestCase
TestTransfers.settings = settings(max_examples=40, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow])
TestTransfersOnDevice.settings = TestTransfers.settings


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("machine", [Transfers, TransfersOnDevice])
def test_many_more_examples(machine: type[Transfers]) -> None:
    more = settings(TestTransfers.settings, max_examples=1000, stateful_step_count=50)
    run_state_machine_as_test(machine, settings=more)
