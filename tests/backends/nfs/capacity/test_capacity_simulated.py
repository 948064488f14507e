"""The shared account on simulated hosts that take turns at every operation of the medium."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from offload_backend_nfs.capacity.account_options import AccountOptions

from offload_core.api.backend import StoredObject
from offload_core.api.keys import ObjectKey
from tests.backends.nfs.capacity.simulation import Host, World

CAPACITY = 1000
HOSTS = 3
LEASE_SECONDS = 60.0


def key(number: int) -> ObjectKey:
    return ObjectKey("ab" * 32, "full-u256", bytes([number]) * 32)


_NUMBERS = st.lists(st.integers(0, 11), min_size=1, max_size=3)
_HOST = st.integers(0, HOSTS - 1)


class Hosts(RuleBasedStateMachine):
    """Processes that store, delete, pin, do housekeeping, fail and die, compared with the bytes on the medium."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.hosts: list[Host] = []
        self.dead = False
        self.failed = False
        self.waited = 0.0

    @initialize(unit=st.sampled_from([0, 0, 100]), grace=st.sampled_from([0.0, 12.0]), existing=st.integers(0, 5))
    def start(self, unit: int, grace: float, existing: int) -> None:
        """Begin with objects that no account has counted."""
        self.options = AccountOptions(CAPACITY, grace_seconds=grace, lease_seconds=LEASE_SECONDS, quota_unit_bytes=unit)
        for number in range(existing):
            self.world.objects[key(number)] = (150, 0.0)
        self.hosts = [self._new() for _ in range(HOSTS)]

    def _new(self) -> Host:
        host = Host(self.world, self.options)
        host.start(host.bounded_store.open)
        return host

    def _idle(self, which: int) -> Host:
        host = self.hosts[which]
        host.finish()
        return host

    @rule(which=_HOST, numbers=_NUMBERS, size=st.sampled_from([1, 60, 150, 400]), spare=st.integers(0, 7))
    def put(self, which: int, numbers: list[int], size: int, spare: int) -> None:
        host = self._idle(which)
        flags = [bool(spare >> index & 1) for index in range(len(numbers))]
        host.start(lambda: host.put([key(number) for number in numbers], [size] * len(numbers), flags))

    @rule(which=_HOST, numbers=_NUMBERS, spare=st.booleans())
    def touch(self, which: int, numbers: list[int], spare: bool) -> None:
        host = self._idle(which)
        host.bounded_store.touch([key(number) for number in numbers], [spare] * len(numbers))

    @rule(which=_HOST, numbers=_NUMBERS)
    def discard(self, which: int, numbers: list[int]) -> None:
        host = self._idle(which)
        host.start(lambda: host.discard([key(number) for number in dict.fromkeys(numbers)]))

    @rule(which=_HOST, numbers=_NUMBERS)
    def pin(self, which: int, numbers: list[int]) -> None:
        host = self._idle(which)
        host.start(lambda: host.pin([key(number) for number in numbers]))

    @rule(which=_HOST)
    def unpin(self, which: int) -> None:
        self._idle(which).unpin()

    @rule(which=_HOST)
    def do_housekeeping(self, which: int) -> None:
        host = self._idle(which)
        host.start(host.bounded_store.step)

    @rule(turns=st.lists(_HOST, min_size=1, max_size=40))
    def turns(self, turns: list[int]) -> None:
        """Let hosts do an operation each, in this order."""
        for which in turns:
            self.hosts[which].advance()
            self.the_limit_holds()

    @rule(which=_HOST)
    def finish(self, which: int) -> None:
        self.hosts[which].finish()

    @rule(seconds=st.sampled_from([1.0, 5.0, 12.0, 31.0, 70.0]))
    def wait(self, seconds: float) -> None:
        """Let time pass; no single write takes as long as half a lease."""
        for host in self.hosts:
            while host.in_a_write:
                host.advance()
        self.world.seconds += seconds
        self.waited += seconds

    @rule(which=_HOST, when=st.sampled_from(["before", "after"]))
    def fail(self, which: int, when: str) -> None:
        """Let the next operation fail."""
        if self.hosts[which].busy:
            self.hosts[which].fail_next = when
            self.failed = True

    @rule(which=_HOST)
    def kill(self, which: int) -> None:
        """Kill a process; another one starts."""
        self.hosts[which].kill()
        self.hosts[which] = self._new()
        self.dead = True

    @rule(which=_HOST)
    def restart(self, which: int) -> None:
        """End a process cleanly; another one starts."""
        host = self._idle(which)
        host.unpin()
        host.do(host.bounded_store.close)
        self.hosts[which] = self._new()

    @precondition(lambda self: self.dead)
    @rule()
    def remove_leftovers(self) -> None:
        """Remove the leftovers of killed writers."""
        self.world.leftover_bytes = 0

    @invariant()
    def the_limit_holds(self) -> None:
        assert self.world.real_bytes <= CAPACITY
        assert not any(host.removed_own_pin for host in self.hosts), "a process has evicted what it had pinned itself"

    def teardown(self) -> None:
        """Check that unused capacity is released after any run."""
        if not self.hosts:
            return
        for host in self.hosts:
            host.finish()
            host.unpin()
        if not self.dead and not self.failed and self.waited < LEASE_SECONDS:  # else some leases may have expired
            self._all_leave()
            self._check_that_the_account_is_exact()
        self._all_leave()
        last = Host(self.world, self.options)
        last.do(last.bounded_store.open)
        for _ in range(4):  # it takes over, removes dead members, ends their batches, and counts
            self.world.seconds += LEASE_SECONDS / 4
            for _ in range(5):
                self.world.seconds += LEASE_SECONDS / 4
                last.do(last.bounded_store.step)
        last.do(lambda: last.bounded_store._housekeeping._scan())
        state = last.bounded_store.state
        assert list(state.members) == [state.housekeeper]
        assert state.occupied_bytes == self.world.real_bytes
        last.do(last.bounded_store.close)

    def _all_leave(self) -> None:
        for host in self.hosts:
            host.do(host.bounded_store.close)
        self.hosts = []

    def _check_that_the_account_is_exact(self) -> None:
        reader = Host(self.world, self.options)
        reader.do(reader.bounded_store.open)
        if reader.bounded_store.state.counted:
            assert reader.bounded_store.state.occupied_bytes == self.world.real_bytes
        reader.do(reader.bounded_store.close)


def test_a_scan_beside_a_deletion_subtracts_nothing_twice() -> None:
    """The scan misses an object that is gone, and its bytes are subtracted after the scan."""
    world = World()
    options = AccountOptions(CAPACITY, grace_seconds=0.0, lease_seconds=LEASE_SECONDS, quota_unit_bytes=0)
    housekeeper, other = Host(world, options), Host(world, options)
    for host in (housekeeper, other):
        host.do(host.bounded_store.open)
    housekeeper.do(lambda: housekeeper.put([key(0), key(1)], [400, 400]))
    for host in (housekeeper, other):  # all bytes move from the quota to the account
        host.do(host.bounded_store.step)

    other.start(lambda: other.discard([key(1)]))
    while key(1) in world.objects:
        other.advance()
    housekeeper.do(housekeeper.bounded_store._housekeeping._scan)
    other.finish()
    housekeeper.do(housekeeper.bounded_store.step)

    assert housekeeper.bounded_store.state.occupied_bytes == world.real_bytes == 400
    for host in (other, housekeeper):
        host.do(host.bounded_store.close)


def test_a_new_account_is_counted_without_the_objects_that_were_deleted_meanwhile() -> None:
    world = World()
    options = AccountOptions(CAPACITY, grace_seconds=0.0, lease_seconds=LEASE_SECONDS, quota_unit_bytes=0)
    for number in range(4):  # four pages, so that opening does not count them
        world.objects[key(number)] = (200, 0.0)
    housekeeper, other = Host(world, options), Host(world, options)
    for host in (housekeeper, other):
        host.do(host.bounded_store.open)
    assert [host.bounded_store.state.counted for host in (housekeeper, other)] == [False, False]

    found: list[int] = []

    def scan() -> None:
        pages = housekeeper.pages

        def counted_pages(progress: Callable[[], None] = lambda: None) -> Iterator[Sequence[StoredObject]]:
            for page in pages(progress):
                found.append(len(page))
                yield page

        housekeeper.pages = counted_pages  # type: ignore[method-assign]
        housekeeper.bounded_store.step()

    housekeeper.start(scan)
    while not found:  # the first page has the object that is deleted
        housekeeper.advance()
    other.do(lambda: other.discard([key(0)]))
    housekeeper.finish()
    housekeeper.do(housekeeper.bounded_store.step)

    assert housekeeper.bounded_store.state.counted
    assert housekeeper.bounded_store.state.occupied_bytes == world.real_bytes == 600
    for host in (other, housekeeper):
        host.do(host.bounded_store.close)


SETTINGS = hypothesis.settings(
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=[phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain],
)


def test_hosts_that_take_turns_at_every_operation_keep_one_limit() -> None:
    run_state_machine_as_test(Hosts, settings=hypothesis.settings(SETTINGS, max_examples=60, stateful_step_count=30))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_hosts_that_take_turns_keep_one_limit_in_many_more_orders() -> None:
    run_state_machine_as_test(Hosts, settings=hypothesis.settings(SETTINGS, max_examples=2000, stateful_step_count=60))
