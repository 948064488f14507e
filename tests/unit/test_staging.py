"""The staging pool: budgets, leases, and waiting for room."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from offload_core.staging import Lease, StagingPool
from offload_core.staging_size import ALIGNMENT_BYTES

PAGES = 12
STORE_PAGES = 5


class Pool(RuleBasedStateMachine):
    """Leases against a model: who holds which bytes. Each lease's memory is filled with its own number."""

    def __init__(self) -> None:
        super().__init__()
        # 100 bytes too many, which rounding takes away; a share of 5 pages and a bit.
        self.pool = StagingPool(PAGES * ALIGNMENT_BYTES + 100, (STORE_PAGES + 0.5) / PAGES)
        self.held: dict[Lease, tuple[int, bool]] = {}
        self.number = 0

    def offset(self, lease: Lease) -> int:
        return (lease.tensor.data_ptr() - self.pool.tensor.data_ptr()) // ALIGNMENT_BYTES

    def pages(self, lease: Lease) -> range:
        start = self.offset(lease)
        return range(start, start + -(-lease.nbytes // ALIGNMENT_BYTES))

    def longest_free_run(self, first_page: int) -> int:
        taken = {page for lease in self.held for page in self.pages(lease)}
        longest = run = 0
        for page in range(first_page, PAGES):
            run = 0 if page in taken else run + 1
            longest = max(longest, run)
        return longest

    @rule(nbytes=st.integers(1, 7 * ALIGNMENT_BYTES), for_store=st.booleans())
    def acquire(self, nbytes: int, for_store: bool) -> None:
        lease = self.pool.try_acquire(nbytes, for_store=for_store)
        pages = -(-nbytes // ALIGNMENT_BYTES)
        if lease is None:
            assert self.longest_free_run(PAGES - STORE_PAGES if for_store else 0) < pages
            if not for_store and all(store for _, store in self.held.values()):
                assert pages > PAGES - STORE_PAGES, "stores alone leave the rest of the pool in one piece to loads"
            return
        assert lease.nbytes == len(lease.view) == lease.tensor.numel() == nbytes
        assert lease.tensor.data_ptr() % ALIGNMENT_BYTES == 0
        self.number = self.number % 127 + 1
        lease.view[:] = bytes([self.number]) * nbytes
        self.held[lease] = (self.number, for_store)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.held, key=self.offset)))
        number, _ = self.held.pop(lease)
        assert bytes(lease.view) == bytes([number]) * lease.nbytes
        assert lease.tensor.tolist() == [number] * lease.nbytes
        lease.release()
        used = self.pool.used_bytes
        for use in (lease.release, lambda: lease.view, lambda: lease.tensor):
            with pytest.raises(RuntimeError, match="used after its release"):
                use()
        assert self.pool.used_bytes == used

    @invariant()
    def budgets_are_kept(self) -> None:
        assert self.pool.used_bytes == sum(len(self.pages(lease)) for lease in self.held) * ALIGNMENT_BYTES
        assert self.pool.used_bytes <= self.pool.capacity_bytes == PAGES * ALIGNMENT_BYTES
        stored = sum(len(self.pages(lease)) for lease, (_, store) in self.held.items() if store)
        assert stored <= STORE_PAGES

    @invariant()
    def leases_do_not_overlap(self) -> None:
        taken = [page for lease in self.held for page in self.pages(lease)]
        assert len(taken) == len(set(taken))
        assert all(0 <= page < PAGES for page in taken)

    def teardown(self) -> None:
        for lease in self.held:
            lease.release()
        assert self.pool.used_bytes == 0
        everything = self.pool.try_acquire(PAGES * ALIGNMENT_BYTES, for_store=False)
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
    with pytest.raises(ValueError, match="staging capacity is 4095 bytes; it must be at least 4096"):
        StagingPool(4095, 0.5)


async def started(pool: StagingPool, nbytes: int) -> asyncio.Task[list[Lease]]:
    """Start to wait for a lease that has no room yet."""
    task = asyncio.create_task(pool.acquire_all([nbytes]))
    await asyncio.sleep(0)  # one turn is all that acquire needs to find the pool full and wait
    assert not task.done()
    return task


def full_pool() -> tuple[StagingPool, list[Lease]]:
    pool = StagingPool(4 * ALIGNMENT_BYTES, 0.5)
    leases = [acquired(pool, ALIGNMENT_BYTES, for_store=False) for _ in range(4)]
    assert pool.try_acquire(1, for_store=False) is None
    return pool, leases


def test_acquire_waits_and_is_woken_by_a_release_in_another_thread() -> None:
    pool, leases = full_pool()

    async def main() -> Lease:
        task = await started(pool, 2 * ALIGNMENT_BYTES)
        await asyncio.to_thread(leases[1].release)
        for _ in range(3):  # one page is not enough; it is woken and waits on
            await asyncio.sleep(0)
        assert not task.done()
        await asyncio.to_thread(leases[2].release)
        (lease,) = await asyncio.wait_for(task, 30)
        return lease

    lease = asyncio.run(main())
    assert lease.nbytes == 2 * ALIGNMENT_BYTES
    assert pool.used_bytes == 4 * ALIGNMENT_BYTES
    lease.release()  # nobody waits any more, and the loop on which somebody did is closed


def test_one_release_wakes_every_waiter_that_finds_room() -> None:
    pool, leases = full_pool()

    async def main() -> None:
        tasks = [await started(pool, ALIGNMENT_BYTES) for _ in range(2)]
        for lease in leases[:2]:
            threading.Thread(target=lease.release).start()
        async with asyncio.timeout(30):
            got = [lease for (lease,) in await asyncio.gather(*tasks)]
        assert got[0].tensor.data_ptr() != got[1].tensor.data_ptr()

    asyncio.run(main())


@pytest.mark.parametrize("released_first", [False, True], ids=["while waiting", "when just woken"])
def test_a_cancelled_acquire_leaves_nothing_leased(released_first: bool) -> None:
    pool, leases = full_pool()

    async def main() -> None:
        task = await started(pool, ALIGNMENT_BYTES)
        if released_first:
            leases.pop().release()
            await asyncio.sleep(0)  # the wake-up has been delivered, the task has not run yet
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for lease in leases:
            lease.release()
        assert pool.used_bytes == 0
        (await asyncio.wait_for(pool.acquire_all([4 * ALIGNMENT_BYTES]), 30))[0].release()

    asyncio.run(main())
    assert pool.used_bytes == 0


def test_acquire_refuses_at_once_what_can_never_fit() -> None:
    pool = StagingPool(2 * ALIGNMENT_BYTES, 0.5)
    with pytest.raises(ValueError, match="objects of 12288 bytes do not fit into 8192 bytes of staging"):
        asyncio.run(pool.acquire_all([8193]))
