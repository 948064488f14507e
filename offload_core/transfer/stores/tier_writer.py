"""The writer of one tier: its store queue, its calls and their deadlines.

The engine thread adds batches and drops old objects. The I/O loop handles the deadlines, with one timer per tier. Calls
start on the thread that makes it possible: the one that has added a batch or on which an earlier call ends. One lock
guards the state that several threads change, for the writers of all tiers, since one object may be with several
writers. No thread holds it during a call, a copy or a wait.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

from offload_core.memory.staging_shares import TierShare
from offload_core.planning.write_policy import WritePolicy
from offload_core.runtime.metrics import Counters
from offload_core.tiers.tier import Tier
from offload_core.transfer.call_size import CallSize, slots_of_call, store_slots_of
from offload_core.transfer.jobs import Job, JobState, JobTable
from offload_core.transfer.stores.pending_store import PendingStore
from offload_core.transfer.stores.store_queue import BatchState, StoreBatch, StoreCall, StoreQueue

logger = logging.getLogger(__name__)

_PAUSE_OF_SPARES_SECONDS = 5.0
"""After a tier had no capacity for a spare object, none is copied for it for this time."""


class TierWriter:
    """All pending stores of one tier.

    Args:
        call_size: the size of the tier's calls.
        lock: guards all writers and their objects.
    """

    def __init__(
        self,
        tier: Tier,
        share: TierShare,
        *,
        call_size: CallSize,
        jobs: JobTable,
        counters: Counters,
        lock: threading.Condition,
    ) -> None:
        self.tier = tier
        self.name = tier.name
        self.policy = WritePolicy(tier.config.write_policy)
        self._share = share
        self._jobs = jobs
        self._job_of: dict[StoreBatch[PendingStore], Job] = {}
        self._counters = counters
        self._lock = lock
        self._queue: StoreQueue[PendingStore] = StoreQueue(
            store_slots_of(tier),
            spare_slots=tier.config.io_threads,
            charge_bytes=lambda store: share.store_charge_bytes(store.nbytes),
            slots_of_call=partial(slots_of_call, tier),
        )
        self._call_size = call_size
        self._timer: asyncio.TimerHandle | None = None
        """Only the I/O loop changes it."""
        self._stored_at = float("-inf")
        capabilities = tier.capabilities
        self.limits_spares = capabilities.bounded or capabilities.evicts
        """True if a spare object may use free capacity only. A tier without a limit stores it as any other object."""
        self._knows_spares = capabilities.spares
        self._spares_from = float("-inf")

    # For the engine thread

    def takes_spare(self, busy: bool) -> bool:
        """Return whether to offer a spare object: there may be free capacity, and nothing else waits for the tier.

        Args:
            busy: whether requests wait for loads.
        """
        if not self.limits_spares:
            return True
        return (
            self._knows_spares and not busy and not self._queue.waiting_bytes and time.monotonic() >= self._spares_from
        )

    def charge(self, nbytes: int, *, may_drop: bool) -> bool:
        """Charge the tier for an object with a lease of ``nbytes`` bytes; returns ``False`` if its share is full.

        Args:
            may_drop: drop the tier's oldest waiting objects, if that frees enough of the share.
        """
        if self._share.try_charge_store(nbytes):
            return True
        if not may_drop:
            return False
        with self._lock:
            for batch, store in self._queue.drop_oldest(self._share.store_shortfall_bytes(nbytes)):
                self._dropped(batch, store)
        return self._share.try_charge_store(nbytes)

    def discharge(self, nbytes: int) -> None:
        """Undo :meth:`charge` for an object that is not added."""
        self._share.discharge_store(nbytes)

    def begin(self, stores: Sequence[PendingStore], submitted: float) -> StoreBatch[PendingStore]:
        """Add objects that the tier is charged for. They need not be sealed yet.

        Args:
            submitted: time of the submission, by the monotonic clock in seconds; the deadline counts from it.
        """
        deadline = submitted + self.tier.limits.store_timeout_seconds
        with self._lock:
            batch = self._queue.begin(stores, deadline)
            self._job_of[batch] = job = self._jobs.submit("store", self.name, deadline)
            self._jobs.hold(job, len(stores))
            for store in stores:
                store.assign(self.name, self._share, batch)
        self._counters.add("pending_stores", self.name, len(stores))
        return batch

    @property
    def needs_timer(self) -> bool:
        """True if the I/O loop must call :meth:`start_timer` for a batch that was added just now."""
        return self._timer is None

    # For the I/O loop

    def start_timer(self) -> None:
        """Set the timer for the next deadline, unless it is set."""
        with self._lock:
            deadline = self._queue.next_deadline
        if self._timer is None and deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._expire_batches)

    def stop_timer(self) -> None:
        """Handle no more deadlines."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire_batches(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        with self._lock:
            due = self._queue.expire(loop.time())
            for batch, state in due:
                self._counters.add("store_timeouts", self.name, len(batch.items))
                self._publish_not_stored(batch, state, JobState.TIMED_OUT)
        for batch, state in due:
            if self._blames_medium(batch, state):
                self.tier.health.timed_out("store", batch.items[0].key)
        self.start_timer()
        self.start_calls()

    def _blames_medium(self, batch: StoreBatch[PendingStore], state: BatchState) -> bool:
        """Return whether a missed deadline is a fault of the medium, rather than of a long queue.

        A tier that has stored an object since the submission is only slow. A tier on trial is judged by this call only.
        """
        if state is BatchState.PREPARING:
            return False
        on_trial = state is BatchState.RUNNING and not self.tier.health.available
        return on_trial or self._stored_at < batch.deadline - self.tier.limits.store_timeout_seconds

    # For any thread

    def prepared(self, batch: StoreBatch[PendingStore], *, sealed: bool = True) -> None:
        """Note that the preparation of a batch has ended: it waits for a slot if its objects are ``sealed``."""
        with self._lock:
            if not self._queue.prepared(batch, sealed=sealed):
                self._release(batch, [])
        self.start_calls()

    def start_calls(self) -> None:
        """Start the tier's calls for waiting batches, as long as there are slots. A call may take several batches."""
        while self._queue.waiting_bytes:
            if not self.admits():
                return
            with self._lock:
                call = self._queue.start_next(self._call_size.take)
                if call is None:
                    return
                begin, started = time.monotonic(), False
                for batch in call.batches:
                    self._jobs.start(self._job_of[batch])
                    submitted = batch.deadline - self.tier.limits.store_timeout_seconds
                    self._counters.observe("store_queue_seconds", self.name, max(0.0, begin - submitted))
            try:
                on_end = partial(self._ended, call, begin)
                started = self.tier.start_store([store.staged for store in call.items], on_end)
            except Exception:
                logger.exception("a store on %s cannot start; this is a defect, please report it", self.tier.label)
            if not started:
                self._end(call, begin, [])

    def _ended(self, call: StoreCall[PendingStore], begin: float, stored: Sequence[bool]) -> None:
        """Note the end of a call, and start the next ones."""
        self._end(call, begin, stored)
        self.start_calls()

    def _end(self, call: StoreCall[PendingStore], begin: float, stored: Sequence[bool]) -> None:
        now = time.monotonic()
        results = iter(stored)
        with self._lock:
            if any(stored):
                self._stored_at = now
            if self.limits_spares and any(
                store.staged.spare and not there for store, there in zip(call.items, stored, strict=False)
            ):
                self._spares_from = now + _PAUSE_OF_SPARES_SECONDS
            self._call_size.ended(len(call.batches), now - begin, worked=any(stored), failed=not any(stored))
            self._queue.ended(call)
            for batch in call.batches:
                self._release(batch, list(islice(results, len(batch.items))))

    def admits(self) -> bool:
        """Return whether the tier's circuit breaker admits stores. If not, drop all waiting objects."""
        if self.tier.health.admits("store"):
            return True
        with self._lock:
            for batch, store in self._queue.drop_oldest(self._queue.waiting_bytes):
                self._dropped(batch, store)
        return False

    # For any thread, under the lock

    def waiting(self) -> Iterator[PendingStore]:
        """Yield waiting objects, the oldest first. The writer must not change meanwhile."""
        return (store for _, store in self._queue.waiting())

    def drop(self, batch: StoreBatch[PendingStore], store: PendingStore) -> None:
        """Drop a waiting object."""
        self._queue.drop(batch, store)
        self._dropped(batch, store)

    def cancel_all(self) -> None:
        """Drop waiting objects and cancel the jobs of all other batches; running calls go on."""
        for batch, state in self._queue.expire(float("inf")):
            if state is BatchState.WAITING:
                for store in batch.items:
                    self._count_dropped(store)
            self._publish_not_stored(batch, state, JobState.CANCELLED)

    def _publish_not_stored(self, batch: StoreBatch[PendingStore], state: BatchState, verdict: JobState) -> None:
        """Publish that no object of a batch is stored. Sealing or a call that uses their memory goes on."""
        self._jobs.end(self._job_of[batch], verdict)
        for store in batch.items:
            store.decide(self.name, stored=False)
        if state is BatchState.WAITING:
            self._release(batch, [])

    def _release(self, batch: StoreBatch[PendingStore], stored: Sequence[bool]) -> None:
        """Release a batch that has left the queue.

        Args:
            stored: the result of its call, per object; empty if there was no call or the call raised an error.
        """
        job = self._job_of.pop(batch)
        self._counters.add("pending_stores", self.name, -len(batch.items))
        for store, is_stored in zip(batch.items, (*stored, *[False] * len(batch.items)), strict=False):
            if is_stored:
                self.policy.has_stored(store.key)
                if store.promotion:
                    self._counters.add("promotions", self.name)
                if batch.expired:
                    self._counters.add("store_late", self.name)
            store.decide(self.name, is_stored)
            store.release(self.name)
        self._jobs.release(job, len(batch.items))
        if not job.ended:
            self._jobs.end(job, JobState.DONE if stored.count(True) == batch.size else JobState.FAILED)

    def _dropped(self, batch: StoreBatch[PendingStore], store: PendingStore) -> None:
        """Release an object that was dropped from the queue."""
        self._count_dropped(store)
        self._counters.add("pending_stores", self.name, -1)
        store.decide(self.name, stored=False)
        store.release(self.name)
        job = self._job_of[batch]
        self._jobs.release(job, 1)
        if not job.leases:  # the last one of its batch
            del self._job_of[batch]
            self._jobs.end(job, JobState.CANCELLED)

    def _count_dropped(self, store: PendingStore) -> None:
        self._counters.add("promotions_dropped" if store.promotion else "store_dropped", self.name)
