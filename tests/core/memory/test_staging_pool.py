"""The staging pool: budgets, leases, waiting for room, and a reserve for memory that nobody can release."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from offload_core.memory.byte_budget import ByteBudget
from offload_core.memory.staging_pool import Lease, StagingPool
from offload_core.memory.staging_size import ALIGNMENT_BYTES

PAGES = 16
RESERVE_PAGES = 12
RESERVE = PAGES + 1
"""The first page of the reserve."""
STORE_PAGES = 5
OWN_PAGES = (2, 3)
LIMIT_PAGES = (6, 11)


class Pool(RuleBasedStateMachine):
    """Leases against a model: who holds which bytes. Each lease's memory is filled with its own number.

    There are three kinds of holders: the loads of two tiers, each with a limit and a piece of its own, and stores. At
    any time, a reserve may take the place of what they hold, as if its holder were a process that is not gone.
    """

    def __init__(self) -> None:
        super().__init__()
        # 100 bytes too many, which rounding takes away; a share of 5 pages and a bit.
        arena = memoryview(mmap.mmap(-1, (RESERVE + RESERVE_PAGES) * ALIGNMENT_BYTES))
        self.pool = StagingPool(PAGES * ALIGNMENT_BYTES + 100, (STORE_PAGES + 0.5) / PAGES, arena=arena)
        self.shares = [
            self.pool.add_load_share(limit * ALIGNMENT_BYTES + 7, own * ALIGNMENT_BYTES)
            for limit, own in zip(LIMIT_PAGES, OWN_PAGES, strict=True)
        ]
        self.held: dict[Lease, tuple[int, int | None]] = {}
        self.replaced: list[Lease] = []
        self.outer = ByteBudget(6)
        """A limit of somebody else, which rises too."""
        self.raised: list[tuple[set[Lease], int]] = []
        self.number = 0

    def offset(self, lease: Lease) -> int:
        return (lease.tensor.data_ptr() - self.pool.tensor.data_ptr()) // ALIGNMENT_BYTES

    def pages(self, lease: Lease) -> range:
        start = self.offset(lease)
        return range(start, start + -(-lease.nbytes // ALIGNMENT_BYTES))

    def held_pages(self, holder: int | None) -> int:
        return sum(len(self.pages(lease)) for lease, (_, other) in self.held.items() if other == holder)

    def replaced_pages(self, *holders: int | None) -> int:
        return sum(len(self.pages(lease)) for lease in self.replaced if self.held[lease][1] in holders)

    def limit_pages(self, holder: int | None) -> int:
        return (STORE_PAGES if holder is None else LIMIT_PAGES[holder]) + self.replaced_pages(holder)

    def reserve_pages(self) -> range:
        return range(RESERVE, RESERVE + self.replaced_pages(None, 0, 1))

    def longest_free_run(self, first_page: int, end_page: int | None = None) -> int:
        taken = {page for lease in self.held for page in self.pages(lease)}
        longest = run = 0
        last = [*range(end_page)] if end_page is not None else [*range(PAGES), -1, *self.reserve_pages()]
        for page in last:
            run = 0 if page in taken or page < first_page else run + 1
            longest = max(longest, run)
        return longest

    def take(self, lease: Lease, nbytes: int, holder: int | None) -> None:
        assert lease.nbytes == len(lease.view) == lease.tensor.numel() == nbytes
        assert lease.tensor.data_ptr() % ALIGNMENT_BYTES == 0
        assert set(self.pages(lease)) <= {*range(PAGES)} or set(self.pages(lease)) <= {*self.reserve_pages()}
        self.number = self.number % 127 + 1
        lease.view[:] = bytes([self.number]) * nbytes
        self.held[lease] = (self.number, holder)

    @rule()
    def replace(self) -> None:
        room = RESERVE_PAGES - self.replaced_pages(None, 0, 1)
        before, group = room, set()
        for lease in self.held:
            if lease not in self.replaced and len(self.pages(lease)) <= room:
                self.replaced.append(lease)
                group.add(lease)
                room -= len(self.pages(lease))
        unknown = max(0, self.outer.held_bytes - sum(raised for _, raised in self.raised))
        assert self.pool.replace_held([self.outer]) == (before - room) * ALIGNMENT_BYTES
        if group:
            self.raised.append((group, unknown))

    @rule(nbytes=st.integers(1, 5))
    def use_outer_limit(self, nbytes: int) -> None:
        fits = self.outer.held_bytes + nbytes <= 6 + sum(raised for _, raised in self.raised)
        assert self.outer.try_take(nbytes) == fits

    @rule(nbytes=st.integers(1, 5))
    def give_outer_bytes_back(self, nbytes: int) -> None:
        self.outer.give_back(min(nbytes, self.outer.held_bytes))

    @rule(nbytes=st.integers(1, 7 * ALIGNMENT_BYTES))
    def store(self, nbytes: int) -> None:
        lease = self.pool.try_acquire(nbytes, for_store=True)
        pages = -(-nbytes // ALIGNMENT_BYTES)
        if lease is None:
            no_room = self.longest_free_run(PAGES - STORE_PAGES) < pages
            assert no_room or self.held_pages(None) + pages > self.limit_pages(None)
            return
        self.take(lease, nbytes, None)

    @rule(sizes=st.lists(st.integers(1, 5 * ALIGNMENT_BYTES), max_size=3), tier=st.integers(0, 1))
    def load(self, sizes: list[int], tier: int) -> None:
        before = self.pool.used_bytes
        leases = self.pool.try_acquire_all(sizes, self.shares[tier])
        pages = [-(-nbytes // ALIGNMENT_BYTES) for nbytes in sizes]
        if leases is None:
            assert self.pool.used_bytes == before, "all or nothing"
            if self.held_pages(tier) == 0:
                assert sum(pages) > min(OWN_PAGES[tier], LIMIT_PAGES[tier]), "a tier's own piece is always there for it"
            if len(pages) == 1 and self.held_pages(tier) + pages[0] <= self.limit_pages(tier):
                assert self.longest_free_run(sum(OWN_PAGES)) < pages[0]
                own = sum(OWN_PAGES[:tier])
                assert self.longest_free_run(own, own + OWN_PAGES[tier]) < pages[0]
            return
        for lease, nbytes in zip(leases, sizes, strict=True):
            self.take(lease, nbytes, tier)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def convert_to_store(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.held, key=self.offset)))
        number, holder = self.held[lease]
        nobodys = self.offset(lease) >= sum(OWN_PAGES)
        room = self.held_pages(None) + len(self.pages(lease)) <= self.limit_pages(None)
        converts = holder is not None and nobodys and room and lease not in self.replaced
        assert self.pool.convert_to_store(lease) == converts
        if converts:
            self.held[lease] = (number, None)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.held, key=self.offset)))
        number, _ = self.held[lease]
        assert bytes(lease.view) == bytes([number]) * lease.nbytes
        assert lease.tensor.tolist() == [number] * lease.nbytes
        lease.release()
        if lease in self.replaced:
            self.replaced.remove(lease)
            for group, _ in self.raised:
                group.discard(lease)
            self.raised = [(group, raised) for group, raised in self.raised if group]
        used = self.pool.used_bytes
        for use in (lease.release, lambda: lease.view, lambda: lease.tensor, lambda: self.pool.convert_to_store(lease)):
            with pytest.raises(RuntimeError, match="used after its release"):
                use()
        assert self.pool.used_bytes == used
        del self.held[lease]

    @invariant()
    def budgets_are_kept(self) -> None:
        assert self.pool.used_bytes == sum(len(self.pages(lease)) for lease in self.held) * ALIGNMENT_BYTES
        assert self.pool.replaced_bytes == len(self.reserve_pages()) * ALIGNMENT_BYTES
        assert self.pool.capacity_bytes == PAGES * ALIGNMENT_BYTES
        assert self.pool.store_bytes == self.held_pages(None) * ALIGNMENT_BYTES
        assert self.held_pages(None) <= self.limit_pages(None)
        for tier, share in enumerate(self.shares):
            assert share.held_bytes == self.held_pages(tier) * ALIGNMENT_BYTES
            assert self.held_pages(tier) <= self.limit_pages(tier)

    @invariant()
    def leases_do_not_overlap_and_keep_out_of_others_pieces(self) -> None:
        taken = [page for lease in self.held for page in self.pages(lease)]
        assert len(taken) == len(set(taken))
        assert all(0 <= page < RESERVE + RESERVE_PAGES and page != PAGES for page in taken)
        for lease, (_, holder) in self.held.items():
            for tier, own in enumerate(OWN_PAGES):
                piece = range(sum(OWN_PAGES[:tier]), sum(OWN_PAGES[:tier]) + own)
                assert holder == tier or not set(piece) & set(self.pages(lease))

    def teardown(self) -> None:
        for lease in self.held:
            lease.release()
        assert self.pool.used_bytes == self.pool.store_bytes == self.pool.replaced_bytes == 0
        assert self.outer.limit_bytes == 6
        everything = self.pool.try_acquire((PAGES - sum(OWN_PAGES)) * ALIGNMENT_BYTES, for_store=False)
        assert everything is not None, "free pieces were not joined"
        everything.release()


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40)


def acquired(pool: StagingPool, nbytes: int, *, for_store: bool) -> Lease:
    lease = pool.try_acquire(nbytes, for_store=for_store)
    assert lease is not None
    return lease


def test_stores_that_hang_leave_loads_their_part_in_one_piece() -> None:
    pool = StagingPool(8 * ALIGNMENT_BYTES, 0.5)
    load = acquired(pool, 2 * ALIGNMENT_BYTES, for_store=False)
    stores = [acquired(pool, ALIGNMENT_BYTES, for_store=True) for _ in range(4)]
    assert pool.try_acquire(1, for_store=True) is None
    load.release()
    for ended in stores[::2]:  # the others hang
        ended.release()
    acquired(pool, 4 * ALIGNMENT_BYTES, for_store=False)


def test_an_empty_lease_is_a_lease() -> None:
    pool = StagingPool(ALIGNMENT_BYTES, 0.5)
    lease = acquired(pool, 0, for_store=False)
    assert (len(lease.view), lease.tensor.numel(), pool.used_bytes) == (0, 0, ALIGNMENT_BYTES)
    lease.release()
    assert pool.used_bytes == 0


def test_a_pool_without_a_page_is_refused() -> None:
    with pytest.raises(ValueError, match="staging capacity is 4095 bytes; set it to 4096 or more"):
        StagingPool(4095, 0.5)
