"""One tier's stores: its queue, its calls and their deadlines.

The engine thread puts batches in and pushes old ones out; the I/O loop starts the tier's calls and sees to the
deadlines, with one timer per tier. What both change is guarded by one lock for the lanes of all tiers, since one object
may be in several; it is never held during a call, a copy or a wait.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from offload_core.memory.staging_shares import TierShare
from offload_core.runtime.metrics import Counters
from offload_core.tiers.tier import Tier
from offload_core.transfer.jobs import Job, JobState, JobTable
from offload_core.transfer.pending_store import OpenStore
from offload_core.transfer.store_queue import Place, StoreBatch, StoreQueue
from offload_core.transfer.write_policy import WritePolicy


class StoreLane:
    """What is on its way to one tier.

    Args:
        lock: guards all lanes and the objects in them.
        spawn: starts a coroutine on the I/O loop, from any thread.
    """

    def __init__(
        self,
        tier: Tier,
        share: TierShare,
        *,
        jobs: JobTable,
        counters: Counters,
        lock: threading.Condition,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self.tier = tier
        self.name = tier.name
        self.policy = WritePolicy(tier.config.write_policy)
        self._share = share
        self._jobs = jobs
        self._job_of: dict[StoreBatch[OpenStore], Job] = {}
        self._counters = counters
        self._lock = lock
        self._spawn = spawn
        threads = tier.config.io_threads
        # One call more than threads, so that they go on writing; no more, since a load would have to wait for it.
        self._queue: StoreQueue[OpenStore] = StoreQueue(
            threads + 1, spare_slots=threads, weigh=lambda store: share.store_charge_bytes(store.nbytes)
        )
        self._timer: asyncio.TimerHandle | None = None  # only for the I/O loop, as is the next
        self._stored_at = float("-inf")

    # For the engine thread

    def charge(self, nbytes: int, *, push_out: bool) -> bool:
        """Charge the tier for an object with a lease of ``nbytes`` bytes; returns whether its share has room.

        Args:
            push_out: drop the oldest objects that wait here, if that makes the room.
        """
        if self._share.try_charge_store(nbytes):
            return True
        if not push_out:
            return False
        with self._lock:
            for batch, store in self._queue.make_room(self._share.store_lack_bytes(nbytes)):
                self._dropped(batch, store)
        return self._share.try_charge_store(nbytes)

    def discharge(self, nbytes: int) -> None:
        """Undo :meth:`charge` for an object that is not put in."""
        self._share.end_store(nbytes)

    def begin(self, stores: Sequence[OpenStore], submitted: float) -> StoreBatch[OpenStore]:
        """Put in objects that the tier is charged for and that may not be sealed yet.

        Args:
            submitted: when they were handed over, by the monotonic clock: their deadline counts from then.
        """
        deadline = submitted + self.tier.limits.store_timeout_seconds
        with self._lock:
            batch = self._queue.begin(stores, deadline)
            self._job_of[batch] = job = self._jobs.submit("store", self.name, deadline)
            self._jobs.hold(job, len(stores))
            for store in stores:
                store.give_to(self.name, self._share, batch)
        return batch

    # For the I/O loop

    def watch(self) -> None:
        """See to it that the next deadline is noticed."""
        with self._lock:
            deadline = self._queue.next_deadline
        if self._timer is None and deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._look_at_deadlines)

    def prepared(self, batch: StoreBatch[OpenStore], *, well: bool = True) -> None:
        """Note that nothing seals the objects of a batch any more: it waits for its turn if it was done ``well``."""
        with self._lock:
            if not self._queue.prepared(batch, well=well):
                self._end(batch, [])
        self.start_calls()

    def start_calls(self) -> None:
        """Start the tier's calls for what waits, as far as there are slots."""
        while self._queue.waiting_bytes:
            if not self.admits():
                return
            with self._lock:
                batch = self._queue.start_next()
                if batch is None:
                    return
                self._jobs.start(self._job_of[batch])
            self._spawn(self._call(batch))

    def unwatch(self) -> None:
        """Look at no more deadlines."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _call(self, batch: StoreBatch[OpenStore]) -> None:
        """Store a batch. Nobody cancels it: when the tier's call has ended, in whichever way, it holds nothing."""
        stored: list[bool] = []
        try:
            stored = await self.tier.store([store.staged for store in batch.items])
            if any(stored):
                self._stored_at = time.monotonic()
        finally:
            with self._lock:
                self._queue.ended(batch)
                self._end(batch, stored)
            self.start_calls()

    def _look_at_deadlines(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        with self._lock:
            due = self._queue.expire(loop.time())
            for batch, place in due:
                self._counters.add("store_timeouts", self.name, len(batch.items))
                self._cut_short(batch, place, JobState.TIMED_OUT)
        for batch, place in due:
            if self._is_evidence(batch, place):
                self.tier.health.timed_out("store", batch.items[0].key)
        self.watch()
        self.start_calls()

    def _is_evidence(self, batch: StoreBatch[OpenStore], place: Place) -> bool:
        """Return whether a missed deadline tells something of the medium, and not only of a long queue.

        A tier that has stored something since then is merely slow, unless it is on trial: then only this call counts.
        """
        if place is Place.PREPARING:
            return False
        on_trial = place is Place.RUNNING and not self.tier.health.available
        return on_trial or self._stored_at < batch.deadline - self.tier.limits.store_timeout_seconds

    # For any thread

    def admits(self) -> bool:
        """Return whether the tier's breaker lets stores through. While it does not, nothing waits here either."""
        if self.tier.health.admits("store"):
            return True
        with self._lock:
            for batch, store in self._queue.make_room(self._queue.waiting_bytes):
                self._dropped(batch, store)
        return False

    # For any thread, under the lock

    def waiting(self) -> Iterator[OpenStore]:
        """Yield what waits here, the oldest first. The lane must not change meanwhile."""
        return (store for _, store in self._queue.waiting())

    def drop(self, batch: StoreBatch[OpenStore], store: OpenStore) -> None:
        """Drop an object that waits here."""
        self._queue.drop(batch, store)
        self._dropped(batch, store)

    def abandon(self) -> None:
        """Drop what waits, and want nothing more of what runs."""
        for batch, place in self._queue.expire(float("inf")):
            if place is Place.WAITING:
                for store in batch.items:
                    self._count_dropped(store)
            self._cut_short(batch, place, JobState.CANCELLED)

    def _cut_short(self, batch: StoreBatch[OpenStore], place: Place, verdict: JobState) -> None:
        """Publish that none of a batch is stored; what its objects' memory is in use for goes on."""
        self._jobs.end(self._job_of[batch], verdict)
        for store in batch.items:
            store.decide(self.name, stored=False)
        if place is Place.WAITING:
            self._end(batch, [])

    def _end(self, batch: StoreBatch[OpenStore], stored: Sequence[bool]) -> None:
        """Let go of a batch that has left the queue; ``stored`` is what its call has returned, if there was one."""
        job = self._job_of.pop(batch)
        for store, there in zip(batch.items, (*stored, *[False] * len(batch.items)), strict=False):
            if there:
                self.policy.has_stored(store.key)
                if store.promotion:
                    self._counters.add("promotions", self.name)
                if batch.expired:
                    self._counters.add("store_late", self.name)
            store.decide(self.name, there)
            store.let_go(self.name)
        self._jobs.let_go(job, len(batch.items))
        if not job.ended:
            self._jobs.end(job, JobState.DONE if stored.count(True) == batch.size else JobState.FAILED)

    def _dropped(self, batch: StoreBatch[OpenStore], store: OpenStore) -> None:
        """Let go of an object that has been taken out of the queue."""
        self._count_dropped(store)
        store.decide(self.name, stored=False)
        store.let_go(self.name)
        job = self._job_of[batch]
        self._jobs.let_go(job, 1)
        if not job.leases:  # the last one of its batch
            del self._job_of[batch]
            self._jobs.end(job, JobState.CANCELLED)

    def _count_dropped(self, store: OpenStore) -> None:
        self._counters.add("promotions_dropped" if store.promotion else "store_dropped", self.name)
