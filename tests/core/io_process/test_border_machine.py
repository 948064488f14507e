"""Random work over the border between the engine's process and its I/O processes, with both sides checked (I1 to I4).

Blocks 0 to 5 hold the stored data, under keys of the same numbers. Loads go to the other blocks. Between loads these
hold a pattern that nothing may change. I/O processes hang, fail, end, stop, and outlive their SIGKILL.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import Enum
from functools import partial
from pathlib import Path
from typing import cast

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from offload_core.memory.staging_pool import StagingPool
from offload_core.runtime.io_loop import IoLoop
from offload_core.transfer.loads import LoadResult
from tests.core.io_process.border_rig import BorderRig, RunningCall, send
from tests.core.io_process.commanded import CANCELLATION, ERROR, EXIT, FORK
from tests.support.logged_errors import LoggedErrors
from tests.support.memory_backend import key
from tests.support.plugin_site import Site
from tests.support.polling import wait_until
from tests.support.process_state import io_process_ids, own_files
from tests.support.random_examples import examples
from tests.support.transfer_rig import PACK, SECONDS, item, number_of

TIERS = ("fast", "slow")
NUMBERS = range(6)
TARGETS = range(6, 20)
PATTERN = 0x5A
PAGE_BYTES = 64 << 10
NOTHING = bytes([PATTERN]) * PAGE_BYTES
STAGING_BYTES = 2 << 20
IO_THREADS = 2
CALL_SECONDS = 0.5
"""Time in which a call mostly reaches its backend."""
JOBS = ("jobs", "jobs_retired", "jobs_done", "jobs_failed", "jobs_timed_out", "jobs_cancelled")

CALLS = ("load", "store")
FAULTS = (ERROR, CANCELLATION, EXIT)

tiers = st.integers(0, len(TIERS) - 1)


class Disturbance(Enum):
    """A change of one tier, or of its process."""

    ERROR = ERROR
    CANCELLATION = CANCELLATION
    EXIT = EXIT
    HANG_OF_PROCESS = "calls of the present process hang"
    HANG_OF_MEDIUM = "calls of its successors hang too"
    SLOWNESS = "copies pause in the middle"
    FORKS = "loads run in forks"
    RECOVERY = "hangs, faults, slowness and forks end"
    KILL = "SIGKILL"
    STOP = "SIGSTOP"
    CONTINUATION = "SIGCONT to each stopped process, replaced ones too"
    DEAFNESS = "SIGSTOP, and the engine's SIGKILL will have no effect yet"
    BURIAL = "it has"


class Border(RuleBasedStateMachine):
    """Random operations on two tiers in I/O processes.

    Args:
        silences: how often it waits for the replacement of a stopped process, which takes seconds.

    Oracle of the engine's side: every offered store and every load has one result. A load brings the bytes of the
    stored block, and no object is found damaged. No block changes without a load, no memory without a lease. No limit
    is exceeded.

    Oracle of the other side: an I/O process runs no more calls than it may, and the memory of each is leased here as
    long as the process is there. In the end no memory is held, every job has one verdict, every tier works, and no
    process and no descriptor is left.
    """

    def __init__(self, folder: Path, silences: int) -> None:
        super().__init__()
        self.folder = folder
        self.silences = silences
        self.rig: BorderRig | None = None
        self.io = IoLoop.acquire()
        self.files = own_files()
        self.errors = LoggedErrors()
        self.offered: Counter[int] = Counter()
        self.results: Counter[int] = Counter()
        self.loads: dict[int, tuple[list[int], list[int]]] = {}
        self.cancelled: dict[int, list[bytes]] = {}
        """Per cancelled load, the content of its blocks at that time."""
        self.ended: dict[int, LoadResult] = {}
        self.lookups: list[Future[list[bool]]] = []
        self.free = list(TARGETS)
        self.killed: set[int] = set()
        self.stopped: set[int] = set()

    @initialize(
        mode=st.sampled_from(["engine", "tier"]),
        load_timeout=st.sampled_from([0.05, SECONDS]),
        store_timeout=st.sampled_from([0.05, SECONDS]),
        breaker_failures=st.sampled_from([2, 1000]),
    )
    def start(self, mode: str, load_timeout: float, store_timeout: float, breaker_failures: int) -> None:
        self.rig = BorderRig(
            self.io,
            self.folder,
            TIERS,
            mode=mode,
            page_bytes=PAGE_BYTES,
            num_blocks=TARGETS.stop,
            staging_bytes=STAGING_BYTES,
            io_threads=IO_THREADS,
            load_timeout_seconds=load_timeout,
            store_timeout_seconds=store_timeout,
            open_timeout_seconds=4 * SECONDS,  # no thread hangs for longer and is replaced
            breaker_failures=breaker_failures,
            breaker_pause_seconds=0.005,
            breaker_max_pause_seconds=0.02,
            promote=True,
        )
        self.blocks = self.rig.kv_cache.numpy()
        self.blocks[TARGETS.start :] = PATTERN
        self.store(NUMBERS)

    # The engine's side

    @rule(numbers=st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=4, unique=True))
    def store_anew(self, numbers: Sequence[int]) -> None:
        """Store objects that the tiers no longer have."""
        for medium in self.there.media:
            for number in numbers:
                medium.forget(number)
        self.store(numbers)

    def store(self, numbers: Sequence[int]) -> None:
        self.there.engine.submit_stores([item(number, block=number) for number in numbers])
        self.offered.update(numbers)

    @rule(
        tier=tiers,
        numbers=st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=4, unique=True),
        seconds=st.sampled_from([0.0, 0.01]),
    )
    def load(self, tier: int, numbers: Sequence[int], seconds: float) -> None:
        self.submit_load(tier, numbers)
        if seconds:
            self.step(seconds)

    def submit_load(self, tier: int, numbers: Sequence[int]) -> int:
        targets, self.free = self.free[: len(numbers)], self.free[len(numbers) :]
        numbers = list(numbers[: len(targets)])
        objects = [item(number, block=block) for number, block in zip(numbers, targets, strict=True)]
        job = self.there.load(*objects, tier=TIERS[tier])
        self.loads[job] = (numbers, targets)
        return job

    @rule(place=st.integers(0, 5))
    def cancel(self, place: int) -> None:
        if self.loads:  # the ended loads depend on time, so this is no precondition
            job = sorted(self.loads)[place % len(self.loads)]
            self.there.engine.cancel_load(job)
            self.cancelled.setdefault(job, [self.content(block) for block in self.loads[job][1]])

    @rule(tier=tiers, seconds=st.sampled_from([0.0, 0.005, 0.05]))
    def look_up_and_step(self, tier: int, seconds: float) -> None:
        wanted = [key(number, PACK) for number in NUMBERS]
        self.lookups.append(self.io.submit(self.there.tiers[tier].lookup(wanted)))
        self.step(seconds)

    def step(self, seconds: float) -> None:
        self.there.engine.wait_for_arrival(seconds)
        self.poll()

    # The other side

    @rule(tier=tiers, call=st.sampled_from(CALLS), disturbance=st.sampled_from(Disturbance))
    def disturb(self, tier: int, call: str, disturbance: Disturbance) -> None:
        medium, pid = self.there.media[tier], self.there.process(tier).pid
        if disturbance is Disturbance.RECOVERY:
            medium.recover()
        elif disturbance is Disturbance.SLOWNESS:
            medium.slow_down()
        elif disturbance is Disturbance.FORKS:
            medium.fork_loads()
        elif disturbance is Disturbance.HANG_OF_MEDIUM:
            medium.shut(call)
        elif disturbance is Disturbance.BURIAL:
            self.there.kills.bury()
        elif disturbance is Disturbance.CONTINUATION:
            self.go_on()
        elif disturbance.value in FAULTS:
            medium.fail(call, disturbance.value)
        elif pid is None:
            pass
        elif disturbance is Disturbance.HANG_OF_PROCESS:
            medium.shut(call, pid)
        elif disturbance is Disturbance.KILL:
            send(pid, signal.SIGKILL)
            self.killed.add(pid)
        elif disturbance is Disturbance.STOP:
            send(pid, signal.SIGSTOP)
            self.stopped.add(pid)
        elif disturbance is Disturbance.DEAFNESS:
            self.there.kills.deaf.add(pid)
            send(pid, signal.SIGSTOP)
            self.stopped.add(pid)
        else:
            raise AssertionError(disturbance)

    def go_on(self) -> None:
        """Let stopped processes go on, also those that have been replaced."""
        for pid in self.stopped:
            send(pid, signal.SIGCONT)
        self.stopped.clear()

    @rule()
    def wait_for_replacements(self) -> None:
        if self.stopped:
            if not self.silences:
                return
            self.silences -= 1
        away = {None, *self.killed, *self.stopped}
        for process in self.there.processes.all:
            self.step_until(lambda process=process: process.pid not in away)  # type: ignore[misc]

    @rule(tier=tiers, call=st.sampled_from(CALLS), number=st.sampled_from(NUMBERS))
    def replace_beside_a_call(self, tier: int, call: str, number: int) -> None:
        """Let a process outlive its SIGKILL in the middle of a call, if there is a process and the call comes."""
        pid = self.there.process(tier).pid
        if pid is None or pid in self.killed | self.stopped or not self.silences:
            return
        self.there.media[tier].recover()
        self.there.media[tier].shut(call, pid)
        self.store_anew([number])
        self.submit_load(tier, [number])
        limit = time.monotonic() + CALL_SECONDS
        while not any(running.pid == pid and running.call == call for running in self.there.running()[tier]):
            if time.monotonic() > limit:  # the breaker is open, the queue is full, or the process has ended
                return
            self.step(0.01)
        self.disturb(tier, call, Disturbance.DEAFNESS)
        self.wait_for_replacements()

    @rule(tier=tiers, number=st.sampled_from(NUMBERS))
    def kill_beside_a_fork(self, tier: int, number: int) -> None:
        """Kill a process whose load runs in a fork, if there is a process and the load comes."""
        pid = self.there.process(tier).pid
        if pid is None or pid in self.killed | self.stopped:
            return
        self.there.media[tier].recover()
        self.there.media[tier].fork_loads()
        self.submit_load(tier, [number])
        limit = time.monotonic() + CALL_SECONDS
        while not any(running.name.endswith(FORK) for running in self.there.running()[tier]):
            if time.monotonic() > limit:  # the breaker is open, the queue is full, or the process has ended
                return
            self.step(0.005)
        self.disturb(tier, "load", Disturbance.KILL)
        self.step(0.02)  # the engine's process hears of it, and the fork goes on

    # What holds at any time

    @property
    def there(self) -> BorderRig:
        assert self.rig is not None
        return self.rig

    def step_until(self, done: Callable[[], bool]) -> None:
        limit = time.monotonic() + SECONDS
        while not done():
            assert time.monotonic() < limit, "the engine has stepped for long enough"
            self.step(0.01)

    def content(self, block: int) -> bytes:
        return bytes(self.blocks[block].tobytes())

    def poll(self) -> None:
        for result in self.there.engine.poll():
            numbers, targets = self.loads.pop(result.job_id)
            self.ended[result.job_id] = result
            assert {int.from_bytes(name.chunk_hash, "big") for name in result.failed_keys} <= set(numbers)
            if result.job_id in self.cancelled:
                assert result.status == "cancelled"
                assert self.cancelled.pop(result.job_id) == list(map(self.content, targets)), "I2: after the cancel"
            for number, block in zip(numbers, targets, strict=True):
                arrived = self.content(block) == self.content(number)
                if result.status == "loaded":
                    assert arrived, f"I1: {number} was loaded and is something else"
                assert arrived or self.content(block) == NOTHING, "I1: neither the object nor what was there"
                self.blocks[block] = PATTERN  # the block belongs to another request now
            self.free += targets
        for stored in self.there.engine.take_store_results():
            self.results[number_of(stored)] += 1
            assert self.results[number_of(stored)] <= self.offered[number_of(stored)], "a store has two results"

    @invariant()
    def no_block_changes_without_a_load(self) -> None:
        assert all(self.content(block) == NOTHING for block in self.free if self.rig is not None), "I2"

    @invariant()
    def no_memory_changes_without_a_lease(self) -> None:
        if self.rig is not None:
            assert self.rig.pool.late_writes == [], "I3"

    @invariant()
    def limits_are_kept(self) -> None:
        if self.rig is None:
            return
        pool = self.rig.pool
        # Replaced leases stay, and others may lie in the reserve until their calls end.
        assert 0 <= pool.used_bytes <= pool.capacity_bytes + pool.most_replaced_bytes
        assert 0 <= pool.store_bytes <= pool.store_limit_bytes
        for tier in self.rig.tiers:
            assert tier.staging is not None
            assert 0 <= tier.staging.loads.held_bytes <= tier.staging.loads.limit_bytes
            assert 0 <= tier.staging.stores.held_bytes <= tier.staging.stores.limit_bytes

    @invariant()
    def each_call_of_a_process_has_leases_here(self) -> None:
        if self.rig is None:
            return
        before = self.rig.running()
        used_bytes = self.rig.pool.used_bytes
        lasting = [without_forks(first & then) for first, then in zip(before, self.rig.running(), strict=True)]
        for its in lasting:
            assert all(count <= IO_THREADS for count in Counter(call.pid for call in its).values()), its
        objects = sum(call.objects for its in lasting for call in its if call.call == "load")
        # Both tiers may store one object at once, from one lease.
        objects += max(sum(call.objects for call in its if call.call == "store") for its in lasting)
        assert objects * self.rig.object_lease_bytes <= used_bytes, f"I3: {lasting} with {used_bytes} bytes leased"

    @invariant()
    def nothing_unexpected_has_happened(self) -> None:
        assert self.errors.messages == []

    # The end

    def teardown(self) -> None:
        try:
            try:
                if self.rig is not None:
                    self.everything_ends_and_works_again()
            finally:
                self.errors.stop()
                if self.rig is not None:
                    self.rig.close()
                self.rig = None
            assert io_process_ids() == [], "an I/O process is left"
            # The thread that watched a process ends shortly after it, and holds a few until then.
            wait_until(lambda: not own_files() - self.files, "descriptors are left")
        finally:
            self.io.release()

    def everything_ends_and_works_again(self) -> None:
        for medium in self.there.media:
            medium.recover()
        self.go_on()  # replaced processes write late now
        held = self.there.kills.held
        self.step_until(lambda: not any(call.pid in held for its in self.there.running() for call in its))
        self.no_memory_changes_without_a_lease()
        self.there.kills.bury()
        self.step_until(lambda: not self.loads)
        assert self.there.engine.drain_stores(SECONDS)
        self.step_until(lambda: self.there.pool.used_bytes == 0)
        self.poll()
        assert self.results == self.offered, "every store has one result"
        self.step_until(lambda: not self.there.engine.jobs.live)
        assert self.there.pool.replaced_bytes == 0, "the reserve is not given back"
        self.there.pool.check_free()
        self.no_memory_changes_without_a_lease()
        assert self.there.running() == [set() for _ in TIERS], "a call goes on"
        self.every_job_has_one_verdict()
        self.every_lookup_has_its_answer()
        for tier in range(len(TIERS)):
            self.stores_and_loads(tier)
        self.poll()
        self.nothing_unexpected_has_happened()

    def every_job_has_one_verdict(self) -> None:
        for name in TIERS:
            counts = {count: self.there.counted(count, name) for count in (*JOBS, "draining_leases", "load_corrupt")}
            assert counts.pop("draining_leases") == 0
            assert counts.pop("load_corrupt") == 0, "I3: a late write has damaged an object"
            jobs, retired, *verdicts = counts.values()
            assert jobs == retired == sum(verdicts), counts

    def every_lookup_has_its_answer(self) -> None:
        for lookup in self.lookups:
            assert len(lookup.result(SECONDS)) == len(NUMBERS)

    def stores_and_loads(self, tier: int) -> None:
        """Store and load until the tier has served, as it does once its process is there and its breaker is closed."""
        limits = self.there.tiers[tier].limits
        self.there.tiers[tier].limits = limits.model_copy(
            update={"load_timeout_seconds": SECONDS, "store_timeout_seconds": SECONDS}
        )
        limit = time.monotonic() + SECONDS
        while not self.serves(tier):
            assert time.monotonic() < limit, f"tier {TIERS[tier]} does not work again"
        assert self.there.engine.drain_stores(SECONDS)
        assert self.there.media[tier].has(0)
        self.step_until(lambda: self.there.pool.used_bytes == 0)

    def serves(self, tier: int) -> bool:
        """Store and load an object; returns whether the store was in time and both have worked."""
        self.store(NUMBERS[:1])
        job = self.submit_load(tier, NUMBERS[:1])
        self.step_until(lambda: job in self.ended)
        return self.ended[job].status == "loaded"


@pytest.fixture
def machine(site: Site, tmp_path: Path) -> Callable[..., Border]:
    """A function that makes machines, each with a folder of its own."""
    site.declare("commanded", "commanded = tests.core.io_process.commanded")
    folders = itertools.count()
    return lambda silences=0: Border(tmp_path / str(next(folders)), silences)


def without_forks(calls: set[RunningCall]) -> set[RunningCall]:
    """Leave out the forks of calls that still wait for them: their memory is the same."""
    names = {call.name for call in calls}
    return {call for call in calls if not (call.name.endswith(FORK) and call.name.removesuffix(FORK) in names)}


def free_pages(pool: StagingPool) -> int:
    """Return the number of leases of a page that the pool has for anybody."""
    leases = list(iter(lambda: pool.try_acquire(1, for_store=False), None))
    for lease in leases:
        lease.release()
    return len(leases)


def store_room_bytes(there: BorderRig) -> list[int]:
    """Return the bytes that stores may still take: all together, and each tier's."""
    budgets = [there.engine._stores.budget, *(tier.staging.stores for tier in there.tiers if tier.staging)]
    return [budget.limit_bytes - budget.held_bytes for budget in budgets]


@pytest.mark.parametrize("call", ["load", pytest.param("store", marks=pytest.mark.long)])
def test_i3_a_process_that_outlives_its_kill_writes_to_no_memory_of_others(
    machine: Callable[..., Border], call: str
) -> None:
    """The calls of a killed process go on, beside those of its replacement, until it is really gone."""
    border = machine(silences=1)
    try:
        border.start(mode="engine", load_timeout=SECONDS, store_timeout=SECONDS, breaker_failures=1000)
        assert border.there.engine.drain_stores(SECONDS)
        border.step_until(lambda: not border.there.pool.used_bytes)
        free, store_room = free_pages(border.there.pool), store_room_bytes(border.there)
        first = border.there.process(0).pid
        border.disturb(0, call, Disturbance.HANG_OF_PROCESS)
        if call == "load":
            hung = border.submit_load(0, [1, 2])
        else:
            border.store_anew([1, 2])
        border.step_until(lambda: any(running.call == call for running in border.there.running()[0]))
        border.disturb(0, call, Disturbance.DEAFNESS)
        border.wait_for_replacements()
        assert border.there.kills.held == {first}
        assert border.there.counted("staging_replaced_bytes", "all") == border.there.pool.used_bytes > 0
        assert free_pages(border.there.pool) == free, "other memory is in its place"
        assert store_room_bytes(border.there) == store_room, "no tier's stores are limited by it"
        border.each_call_of_a_process_has_leases_here()
        border.step_until(lambda: border.serves(0))  # in memory that the old process has no longer, or beside it
        border.disturb(0, call, Disturbance.RECOVERY)
        border.disturb(0, call, Disturbance.CONTINUATION)  # now the old process writes
        border.step_until(lambda: not border.there.running()[0])
        border.step_until(lambda: call == "store" or hung in border.ended)
        border.no_block_changes_without_a_load()
        border.no_memory_changes_without_a_lease()
    finally:
        border.teardown()


# A failure is not made smaller: it depends on time, and each attempt starts processes.
FEW = examples(
    20,
    stateful_step_count=80,
    phases=(Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.timeout(600)  # it starts and ends many processes
def test_random_work(machine: Callable[..., Border]) -> None:
    run_state_machine_as_test(cast("type[Border]", machine), settings=FEW)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_many_more_examples(machine: Callable[..., Border]) -> None:
    make = cast("type[Border]", partial(machine, silences=2))
    run_state_machine_as_test(make, settings=settings(FEW, max_examples=60, stateful_step_count=120))
