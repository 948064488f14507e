"""The loads of a worker: from a tier, through staging or from memory that it lends, into the blocks of the KV cache.

A load is *active* until the engine thread has published its verdict (:mod:`offload_core.transfer.jobs`). An arrival
carries the generation of its job. If that job has ended, the arrival is dropped, at the latest by the engine thread
before the copy into the KV cache. This is the fence: a late arrival never reaches a block that belongs to another
request by then (invariants I2 and I3).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Literal

from offload_core.api.keys import ObjectKey
from offload_core.memory.block_copier import COPY_LOOK_SECONDS, BlockCopier, CopyEnd
from offload_core.memory.staging_pool import Lease, StagingPool
from offload_core.memory.staging_shares import TierShare
from offload_core.objects.format import HEADER_BYTES
from offload_core.runtime.metrics import Counters
from offload_core.tiers.calls.lent_objects import LentObject
from offload_core.tiers.tier import Tier
from offload_core.transfer.batches import Layouts, TransferObject
from offload_core.transfer.jobs import Job, JobState, JobTable
from offload_core.transfer.kept_objects import KeptObjects
from offload_core.transfer.lent_copy import scatter_and_verify
from offload_core.transfer.tier_reader import TierReader


@dataclass(frozen=True)
class LoadJob:
    """All objects that one request waits for, from one tier.

    Args:
        job_id: the caller's number for the load, unique among the loads of one engine.
        objects: in the order of the tokens they hold; a caller that uses a part of a load relies on this order.
        waited_seconds: how long the request has waited for earlier loads; it is subtracted from the time limit.
        keep: whether to keep the objects at hand afterwards, if the tier lends all of them.
    """

    job_id: int
    tier: str
    objects: tuple[TransferObject, ...]
    waited_seconds: float = 0.0
    keep: bool = False


LoadStatus = Literal["loaded", "failed", "timed out", "cancelled"]
_STATUS: dict[JobState, LoadStatus] = {
    JobState.DONE: "loaded",
    JobState.FAILED: "failed",
    JobState.TIMED_OUT: "timed out",
    JobState.CANCELLED: "cancelled",
}


@dataclass(frozen=True)
class LoadResult:
    """The end of a load job.

    Args:
        failed_keys: keys to mistrust. Empty for a loaded or cancelled job, and for a tier that refuses loads.
        arrived_objects: number of the job's first objects that are in their blocks, up to the first gap.
        kept: whether the objects are at hand for :meth:`Loads.copy_kept`, until they are given back.
    """

    job_id: int
    status: LoadStatus
    failed_keys: tuple[ObjectKey, ...] = ()
    arrived_objects: int = 0
    kept: bool = False


@dataclass
class _ActiveLoad:
    job_id: int
    job: Job
    objects: tuple[TransferObject, ...]
    waited_seconds: float
    """Seconds that its request has waited for earlier loads."""
    missing: dict[ObjectKey, TransferObject]
    """Objects that have neither arrived nor failed."""
    keep: bool = False
    lent: dict[ObjectKey, LentObject] = field(default_factory=dict)
    """Objects to keep, which are in their blocks."""
    failed: list[ObjectKey] = field(default_factory=list)
    refused: bool = False
    """True if the tier refused the load, which says nothing about the objects."""

    def due_verdict(self, now: float) -> JobState | None:
        """Return the verdict that is due, or ``None`` while the load goes on."""
        if self.refused:
            return JobState.FAILED
        if self.missing:
            return JobState.TIMED_OUT if now >= self.job.deadline else None
        # A failed load still reads its other objects, so that all damaged ones are found and stored again at once.
        return JobState.FAILED if self.failed else JobState.DONE

    def result(self, verdict: JobState) -> LoadResult:
        """Return the caller's view of the verdict."""
        if verdict is JobState.CANCELLED or self.refused:
            return LoadResult(self.job_id, _STATUS[verdict])
        not_loaded = (*self.failed, *self.missing)
        gaps = set(not_loaded)
        arrived = sum(1 for _ in takewhile(lambda item: item.key not in gaps, self.objects))
        return LoadResult(self.job_id, _STATUS[verdict], not_loaded, arrived)


@dataclass(frozen=True)
class _Arrival:
    job: Job
    key: ObjectKey
    lease: Lease | LentObject | None
    """The loaded object; ``None`` if its load failed. A lent one may have to be verified yet, with its copy."""


@dataclass(frozen=True)
class _Copying:
    """Objects on their way into their blocks, each with its load."""

    end: CopyEnd
    objects: tuple[tuple[_ActiveLoad, ObjectKey, Lease | LentObject], ...] = ()
    given_back: tuple[LentObject, ...] = ()
    """Objects that were kept at hand, and that these copies or earlier ones may still read."""


class Loads:
    """All loads under way. Every method is for the engine thread; only ``wait_for_arrival`` waits.

    Args:
        shares: per tier name.
        jobs: the table to which every load adds its job.
        promote: offers a loaded object (key, lease, name of its tier) to the other tiers; true if it takes the lease.
    """

    def __init__(
        self,
        *,
        tiers: Sequence[Tier],
        staging: StagingPool,
        shares: Mapping[str, TierShare],
        copier: BlockCopier,
        layouts: Layouts,
        jobs: JobTable,
        counters: Counters,
        promote: Callable[[ObjectKey, Lease | LentObject, str], bool],
    ) -> None:
        self._tiers = {tier.name: tier for tier in tiers}
        self._copier = copier
        self._layouts = layouts
        self._jobs = jobs
        self._counters = counters
        self._promote = promote
        self._active: dict[int, _ActiveLoad] = {}
        """Per generation; only the engine thread changes it."""
        self._arrivals: deque[_Arrival] = deque()
        self._arrived = threading.Event()
        self._copying: deque[_Copying] = deque()
        self._kept = KeptObjects()
        self._readers = {
            tier.name: TierReader(
                tier,
                shares[tier.name],
                staging=staging,
                layouts=layouts,
                jobs=jobs,
                counters=counters,
                verifies_lent=copier.in_parts is None,
                on_end=self._hand_over,
            )
            for tier in tiers
        }

    @property
    def has_active(self) -> bool:
        """True if some request waits for a load."""
        return bool(self._active)

    @property
    def has_arrivals(self) -> bool:
        """True if :meth:`scatter_arrivals` has something to do."""
        return self._arrived.is_set()

    def submit(self, load_job: LoadJob) -> None:
        """Start a load. :meth:`take_ended` returns its result, at the latest after its deadline.

        The deadline counts from this call; waiting for a free load slot of the tier counts too.
        """
        tier = self._tiers[load_job.tier]
        nbytes = sum(map(self._layouts.stored_bytes, load_job.objects))
        seconds = max(0.0, tier.limits.load_seconds(nbytes) - load_job.waited_seconds)
        job = self._jobs.submit("load", load_job.tier, time.monotonic() + seconds)
        missing = {item.key: item for item in load_job.objects}
        load = _ActiveLoad(load_job.job_id, job, load_job.objects, load_job.waited_seconds, missing, load_job.keep)
        self._active[job.generation] = load
        if not missing:
            self._jobs.start(job)  # a load without objects is done at once
        elif not tier.health.admits("load"):
            load.refused = True
        else:
            self._readers[tier.name].submit(job, load_job.objects)

    def cancel(self, job_id: int) -> None:
        """Cancel a load: its objects no longer enter the KV cache. The next :meth:`take_ended` reports it."""
        for load in self._active.values():
            if load.job_id == job_id and not load.job.ended:
                self._jobs.end(load.job, JobState.CANCELLED)

    def cancel_all(self) -> None:
        """Cancel all loads, and release the objects that have arrived. The next :meth:`take_ended` reports them.

        The copies into the KV cache must be complete.
        """
        for load in self._active.values():
            if not load.job.ended:
                self._jobs.end(load.job, JobState.CANCELLED)
        self.scatter_arrivals()  # releases them, since their jobs have ended

    def copy_kept(self, tier: str, objects: Sequence[TransferObject]) -> None:
        """Copy objects that are kept at hand into their blocks, now.

        Raises:
            KeyError: an object is not kept; a defect of the caller.
        """
        if not objects:
            return
        lent = [self._kept.get(tier, item.key) for item in objects]
        for item, one in zip(objects, lent, strict=True):
            self._copier.scatter(self._layouts.of(item), item.blocks, one.tensor[HEADER_BYTES:])
        if (end := self._copier.scatters_end()) is not None:
            self._copying.append(_Copying(end))
        self._copier.let_engine_follow_scatters()
        self._counters.add("load_kept", tier, len(objects))

    def give_back(self, job_ids: Iterable[int]) -> None:
        """Keep the objects of some loads no longer. Unknown loads are ignored."""
        objects = self._kept.take(job_ids)
        if self._copying and objects:  # copies begin in order, so the last one's end is that of all
            self._copying.append(_Copying(self._copying[-1].end, given_back=tuple(objects)))
        else:
            _release(objects)

    def scatter_arrivals(self) -> None:
        """Copy all arrived objects into the KV cache, and use the staging memory that they leave."""
        if not (self._active or self._arrivals or self._copying):
            return
        self._arrived.clear()
        copied = []
        while self._arrivals:
            arrival = self._arrivals.popleft()
            if (load := self._scatter(arrival)) is not None and arrival.lease is not None:
                copied.append((load, arrival.key, arrival.lease))
        end = self._copier.scatters_end() if copied else None
        if end is not None:
            self._copying.append(_Copying(end, tuple(copied)))
            copied = []
        self._end_copies(copied)
        while self._copying and self._copying[0].end.has_passed():
            copied_before = self._copying.popleft()
            self._end_copies(copied_before.objects)
            _release(copied_before.given_back)
        for reader in self._readers.values():  # memory may be free now
            reader.start_calls()

    def take_ended(self) -> list[LoadResult]:
        """Return the loads that ended since the last call."""
        if not self._active:
            return []
        now = time.monotonic()
        ended = []
        for load in list(self._active.values()):
            verdict = load.job.verdict or load.due_verdict(now)
            if verdict is not None:
                ended.append(self._publish(load, verdict))
        return ended

    @property
    def longest_wait_seconds(self) -> float:
        """Time after which a waiting caller should look for the ends of copies."""
        return COPY_LOOK_SECONDS if self._copying else float("inf")

    def wait_for_arrival(self, seconds: float) -> None:
        """Wait for an arrival, at most ``seconds``."""
        self._arrived.wait(seconds)

    def close(self) -> None:
        """Cancel all loads. Objects on their way keep their leases until the backend's calls end.

        The copies into the KV cache must be complete.
        """
        for load in self._active.values():
            if not load.job.ended:
                self._jobs.end(load.job, JobState.CANCELLED)
            _release(load.lent.values())
        self._active.clear()
        _release(self._kept.take_all())
        while self._arrivals:
            self._scatter(self._arrivals.popleft())
        while self._copying:
            copied = self._copying.popleft()
            _release([*(lease for _, _, lease in copied.objects), *copied.given_back])

    def _publish(self, load: _ActiveLoad, verdict: JobState) -> LoadResult:
        """End a load, unless it has been cancelled, and return its result."""
        del self._active[load.job.generation]
        if not load.job.ended:
            self._jobs.end(load.job, verdict)
        if self._copying and verdict is not JobState.DONE:  # its blocks may belong to another request soon
            self._copier.let_engine_follow_scatters()
        result = load.result(verdict)
        if verdict is JobState.DONE and load.objects and len(load.lent) == len(load.objects):
            self._kept.add(load.job_id, load.job.tier, load.lent)
            result = replace(result, kept=True)
        else:
            _release(load.lent.values())
        if verdict is JobState.TIMED_OUT:
            self._counters.add("load_timeouts", load.job.tier)
            if not load.waited_seconds:  # a load with less than the tier's own time says little about the tier
                self._tiers[load.job.tier].health.timed_out("load", result.failed_keys[0])
        return result

    def _scatter(self, arrival: _Arrival) -> _ActiveLoad | None:
        """Begin the copy of one arrival into its blocks, and return its load; drop it if its job has ended.

        The load of a lent object that turns out to be damaged fails, so that the engine computes its blocks.
        """
        load = self._active.get(arrival.job.generation)
        if load is None or load.job.ended:
            if arrival.lease is not None:
                self._counters.add("load_late", arrival.job.tier)
                arrival.lease.release()
            return None
        item = load.missing[arrival.key]
        if arrival.lease is None:
            del load.missing[arrival.key]
            load.failed.append(arrival.key)
            return None
        layout = self._layouts.of(item)
        if not isinstance(arrival.lease, LentObject) or self._copier.in_parts is None:
            self._copier.scatter(layout, item.blocks, arrival.lease.tensor[HEADER_BYTES:])
        elif (damage := scatter_and_verify(self._copier.in_parts, layout, item, arrival.lease)) is not None:
            del load.missing[arrival.key]
            load.failed.append(arrival.key)
            arrival.lease.release()
            self._tiers[load.job.tier].found_damaged(arrival.key, damage)
            return None
        return load

    def _end_copies(self, objects: Sequence[tuple[_ActiveLoad, ObjectKey, Lease | LentObject]]) -> None:
        """Note that objects are in their blocks, and use their memory for other tiers or release it."""
        for load, key, lease in objects:
            load.missing.pop(key, None)
            if self._promote(key, lease, load.job.tier):
                continue
            if load.keep and isinstance(lease, LentObject) and not load.job.ended:
                load.lent[key] = lease
            else:
                lease.release()

    def _hand_over(
        self, job: Job, objects: Sequence[TransferObject], memory: Sequence[Lease | LentObject | None]
    ) -> None:
        """Give loaded objects, and the failures of the others, to the engine thread; see :data:`ReadsEnded`."""
        late = job.ended  # release late memory here: an idle engine might never poll again
        for item, lease in zip(objects, memory, strict=True):
            if not late:
                self._arrivals.append(_Arrival(job, item.key, lease))
            elif lease is not None:
                self._counters.add("load_late", job.tier)
                lease.release()
        self._arrived.set()


def _release(memory: Iterable[Lease | LentObject]) -> None:
    for one in memory:
        one.release()
