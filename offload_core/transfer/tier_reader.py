"""The reader of one tier: its waiting loads, its calls and their slots.

The engine thread adds loads. It also starts calls when it has freed staging memory. Otherwise a call starts on the
thread on which an earlier call ends. No thread waits, and none holds the lock during a call or a copy.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, zip_longest

from offload_core.api.backend import LoadOutcome
from offload_core.memory.staging_pool import Lease, StagingPool
from offload_core.memory.staging_shares import TierShare
from offload_core.memory.staging_size import lease_bytes
from offload_core.runtime.metrics import Counters
from offload_core.tiers.calls.lent_objects import LendingEnd, LentObject, WantedObject
from offload_core.tiers.staged_object import StagedObject
from offload_core.tiers.tier import Tier
from offload_core.transfer.batches import Layouts, TransferObject
from offload_core.transfer.call_size import load_size_of, load_slots_of, slots_of_call
from offload_core.transfer.jobs import Job, JobTable

logger = logging.getLogger(__name__)

_Batch = Sequence[TransferObject]

ReadsEnded = Callable[[Job, Sequence[TransferObject], Sequence[Lease | LentObject | None]], None]
"""Gets objects of a job whose load has ended, on any thread, each with its memory.

The memory of an object that was not loaded is ``None``. The receiver releases the memory of the others. The job does
not hold it any more.
"""


@dataclass(frozen=True)
class _Waiting:
    """A load with batches that no call has."""

    job: Job
    batches: deque[_Batch]
    most: int
    """Maximum number of its batches in a call."""
    submitted: float
    """By the monotonic clock, in seconds."""
    may_borrow: bool = True
    """False if the tier does not lend these objects."""


@dataclass(frozen=True, eq=False)
class _Call:
    job: Job
    batches: int
    objects: Sequence[TransferObject]
    staged: Sequence[StagedObject]
    """One per object; none if the objects are borrowed."""
    borrows: bool
    slots: int
    """Number of slots that it takes."""
    submitted: float
    started: float


class TierReader:
    """The loads of one tier. Thread-safe.

    If the tier lends its memory, a load has no staging memory: the objects stay where they are.

    A call past its deadline may never end. Other calls get its slots, for up to ``io_threads`` such slots at once.
    So a medium that has recovered can be used although old calls hang, and the number of running calls stays bounded.

    Args:
        verifies_lent: whether the tier verifies the objects that it lends; otherwise the receiver does.
        on_end: gets the objects of each call that has ended, and those that no call will load.
    """

    def __init__(
        self,
        tier: Tier,
        share: TierShare,
        *,
        staging: StagingPool,
        layouts: Layouts,
        jobs: JobTable,
        counters: Counters,
        verifies_lent: bool,
        on_end: ReadsEnded,
    ) -> None:
        self._tier = tier
        self._verifies_lent = verifies_lent
        self._share = share.loads
        self._staging = staging
        self._layouts = layouts
        self._jobs = jobs
        self._counters = counters
        self._on_end = on_end
        self._slots = load_slots_of(tier)
        self._spare_slots = tier.config.io_threads
        self._call_size = load_size_of(tier, share.loads.limit_bytes)
        self._lock = threading.Lock()
        self._waiting: deque[_Waiting] = deque()
        self._running: set[_Call] = set()

    def submit(self, job: Job, objects: Sequence[TransferObject]) -> None:
        """Load the objects of a job in batches, as many at once as the tier allows."""
        batches: deque[_Batch] = deque(self._layouts.in_batches(objects))
        needed = max(sum(map(lease_bytes, self._lease_sizes([batch]))) for batch in batches)
        if needed > self._share.limit_bytes:  # the configuration has been checked
            logger.error(
                "objects of %d bytes do not fit into the %d bytes of staging of %s; this is a defect, please "
                "report it", needed, self._share.limit_bytes, self._tier.label,
            )  # fmt: skip
            self._on_end(job, objects, [None] * len(objects))
            return
        # A short load is spread over all slots, or makes two calls, so that copies overlap with reads.
        most = -(-len(batches) // (2 if self._tier.is_elsewhere else self._slots))
        with self._lock:
            self._waiting.append(_Waiting(job, batches, most, time.monotonic()))
        self.start_calls()

    def start_calls(self) -> None:
        """Start the calls for waiting batches, as long as there are slots and staging memory."""
        while self._waiting and (call := self._take_next()) is not None:
            started = False
            try:
                if call.borrows:
                    started = self._tier.lending.start_borrow(
                        self._wanted(call.objects), partial(self._borrowed, call), verify=self._verifies_lent
                    )
                else:
                    started = self._tier.start_load(call.staged, partial(self._ended, call))
            except Exception:
                logger.exception("a load on %s cannot start; this is a defect, please report it", self._tier.label)
            if not started:
                self._end(call, [])

    def _take_next(self) -> _Call | None:
        """Return the next call, with its slot and its leases; ``None`` if it has to wait for them."""
        with self._lock:
            while self._waiting and self._has_free_slot():
                first = self._waiting[0]
                if self._jobs.start(first.job):
                    borrows = first.may_borrow and self._tier.lending.is_possible
                    count, leases = (self._batches_of_call(first), []) if borrows else self._try_lease(first)
                    if not count:
                        return None  # the loads behind it wait too: small ones must not overtake a large one for ever
                    if self._jobs.hold(first.job, len(leases)):
                        call = self._new_call(first, count, leases, borrows=borrows)
                        if not first.batches:
                            self._waiting.popleft()
                        return call
                    for lease in leases:
                        lease.release()
                self._waiting.popleft()  # it has its verdict
            return None

    def _has_free_slot(self) -> bool:
        now = time.monotonic()
        overdue = sum(call.slots for call in self._running if call.job.deadline <= now)
        return sum(call.slots for call in self._running) - min(overdue, self._spare_slots) < self._slots

    def _try_lease(self, load: _Waiting) -> tuple[int, list[Lease]]:
        """Lease staging memory for as many of a load's batches as a call takes and there is memory for.

        Returns:
            The number of batches, 0 if there is no memory for one, and the leases.
        """
        count = self._batches_of_call(load)
        while count:
            sizes = self._lease_sizes(list(islice(load.batches, count)))
            leases = self._staging.try_acquire_all(sizes, self._share)
            if leases is not None:
                return count, leases
            count //= 2
        return 0, []

    def _batches_of_call(self, load: _Waiting) -> int:
        """Return how many of a load's batches the next call takes, at least one."""
        return self._call_size.take((sum(self._lease_sizes([batch])) for batch in load.batches), load.most)

    def _wanted(self, objects: Sequence[TransferObject]) -> list[WantedObject]:
        """Return objects to borrow."""
        return [WantedObject(item.key, self._layouts.stored_bytes(item)) for item in objects]

    def _lease_sizes(self, batches: Sequence[_Batch]) -> list[int]:
        """Return the sizes in bytes of the leases for some batches: the objects', then those for compressed bytes."""
        sizes = [self._layouts.stored_bytes(item) for item in chain.from_iterable(batches)]
        return sizes * (1 + self._tier.encodes)

    def _new_call(self, load: _Waiting, count: int, leases: Sequence[Lease], *, borrows: bool) -> _Call:
        batches = [load.batches.popleft() for _ in range(count)]
        objects = list(chain.from_iterable(batches))
        staged: list[StagedObject] = []
        if not borrows:
            staged = [
                StagedObject(item.key, lease, scratch)
                for item, lease, scratch in zip_longest(objects, leases[: len(objects)], leases[len(objects) :])
            ]
        slots = slots_of_call(self._tier, count)
        call = _Call(load.job, count, objects, staged, borrows, slots, load.submitted, time.monotonic())
        self._counters.observe("load_queue_seconds", self._tier.name, call.started - load.submitted)
        self._running.add(call)
        return call

    def _ended(self, call: _Call, outcomes: Sequence[LoadOutcome | None]) -> None:
        """Note the end of a call, and start the next ones."""
        self._end(call, outcomes)
        self.start_calls()

    def _end(self, call: _Call, outcomes: Sequence[LoadOutcome | None]) -> None:
        """Note the end of a call, hand its objects over and release the memory of those that were not loaded."""
        self._free_slot(call, outcomes)
        memory: list[Lease | LentObject | None] = [None] * len(call.objects)
        for index, (staged, outcome) in enumerate(zip_longest(call.staged, outcomes[: len(call.staged)])):
            if staged.scratch is not None:
                staged.scratch.release()
            if outcome is LoadOutcome.HIT:
                memory[index] = staged.lease
        self._jobs.release(call.job, sum(2 if staged.scratch is not None else 1 for staged in call.staged))
        for staged, kept in zip(call.staged, memory, strict=False):
            if kept is None:
                staged.lease.release()
        self._on_end(call.job, call.objects, memory)

    def _borrowed(self, call: _Call, end: LendingEnd[LoadOutcome] | None) -> None:
        """Note the end of a call that borrows, and load the objects that are there and not lent."""
        outcomes = [] if end is None else end.outcomes
        not_lent: list[TransferObject] = []
        answered: list[tuple[TransferObject, LentObject | None]] = [(item, None) for item in call.objects]
        if end is not None:
            pairs = list(zip(call.objects, end.outcomes, end.lent, strict=True))
            not_lent = [item for item, outcome, _ in pairs if outcome is None]
            answered = [(item, lent) for item, outcome, lent in pairs if outcome is not None]
            self._counters.add("load_lent", self._tier.name, end.outcomes.count(LoadOutcome.HIT))
        if not_lent:
            batches: deque[_Batch] = deque(self._layouts.in_batches(not_lent))
            with self._lock:
                self._waiting.appendleft(_Waiting(call.job, batches, len(batches), call.submitted, may_borrow=False))
        self._free_slot(call, outcomes, failed=end is None)
        if answered:
            self._on_end(call.job, [item for item, _ in answered], [lent for _, lent in answered])
        self.start_calls()

    def _free_slot(self, call: _Call, outcomes: Sequence[LoadOutcome | None], *, failed: bool | None = None) -> None:
        seconds = time.monotonic() - call.started
        if failed is None:
            failed = not outcomes or None in outcomes
        with self._lock:
            self._running.discard(call)
            self._call_size.ended(call.batches, seconds, worked=LoadOutcome.HIT in outcomes, failed=failed)
