"""The transfer engine of a worker: loads and stores between the KV cache and the tiers.

Two threads meet here. The *engine thread* calls :class:`TransferEngine`; it alone copies between staging and the KV
cache (invariant I2). The *I/O loop* moves bytes between staging and the tiers. They exchange staging leases: a store's
lease goes from the engine thread to the loop, a load's lease the other way, and back where a faster tier is to keep
what it holds; whoever holds it releases it, once (I3).

A load is *wanted* until its job (:mod:`offload_core.transfer.jobs`) has its verdict. What arrives carries the
generation of the job it was loaded for; unless that very job is still wanted it is dropped, at the latest by the engine
thread before it would copy it. This is the fence: it never touches a block that belongs to another request by then.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile, zip_longest
from typing import Literal

from offload_core.api.backend import LoadOutcome
from offload_core.api.keys import ObjectKey
from offload_core.memory.block_copier import BlockCopier
from offload_core.memory.payload_layout import PackLayout
from offload_core.memory.staging_pool import Lease, StagingPool
from offload_core.memory.staging_shares import share_out
from offload_core.memory.staging_size import gathered_limit_bytes, staging_uses
from offload_core.objects.format import HEADER_BYTES, object_bytes
from offload_core.runtime.io_loop import IoLoop, log_unexpected, run_all
from offload_core.runtime.metrics import Counters
from offload_core.tiers.staged_object import StagedObject
from offload_core.tiers.tier import Tier
from offload_core.transfer.batches import TransferObject, in_batches
from offload_core.transfer.jobs import Job, JobState, JobTable
from offload_core.transfer.pending_store import StoreResult
from offload_core.transfer.stores import Stores


@dataclass(frozen=True)
class LoadJob:
    """Everything that one request waits for, from one tier.

    Args:
        job_id: the caller's name for it, unique among the loads of one engine.
        objects: in the order of the tokens they hold, as far as the caller wants to use a part of them.
        waited_seconds: how long the request has waited for loads before; it is taken off the deadline.
    """

    job_id: int
    tier: str
    objects: tuple[TransferObject, ...]
    waited_seconds: float = 0.0


Status = Literal["loaded", "failed", "timed out", "cancelled"]
_STATUS: dict[JobState, Status] = {
    JobState.DONE: "loaded",
    JobState.FAILED: "failed",
    JobState.TIMED_OUT: "timed out",
    JobState.CANCELLED: "cancelled",
}


@dataclass(frozen=True)
class LoadResult:
    """How a load job ended.

    Args:
        failed_keys: those to mistrust: none when it was loaded or cancelled, or failed because the tier is not used.
        arrived_objects: how many of the job's first objects are in their blocks; more may be behind the first gap.
    """

    job_id: int
    status: Status
    failed_keys: tuple[ObjectKey, ...] = ()
    arrived_objects: int = 0


@dataclass
class _WantedLoad:
    job_id: int
    job: Job
    objects: tuple[TransferObject, ...]
    waited_seconds: float
    """By its request, before."""
    waiting_for: dict[ObjectKey, TransferObject]
    failed: list[ObjectKey] = field(default_factory=list)
    refused: bool = False
    """The tier is not to be asked, which says nothing about the objects."""

    def due_verdict(self, now: float) -> JobState | None:
        """Return how the load has ended, or ``None`` while it goes on."""
        if self.refused:
            return JobState.FAILED
        if self.waiting_for:
            return JobState.TIMED_OUT if now >= self.job.deadline else None
        # A load that has failed goes on to its end, so that all that is damaged is found, and stored anew, at once.
        return JobState.FAILED if self.failed else JobState.DONE

    def result(self, verdict: JobState) -> LoadResult:
        """Tell what the caller is to know of the verdict."""
        if verdict is JobState.CANCELLED or self.refused:
            return LoadResult(self.job_id, _STATUS[verdict])
        missing = (*self.failed, *self.waiting_for)
        gaps = set(missing)
        arrived = sum(1 for _ in takewhile(lambda item: item.key not in gaps, self.objects))
        return LoadResult(self.job_id, _STATUS[verdict], missing, arrived)


@dataclass(frozen=True)
class _Arrival:
    generation: int
    tier: str
    key: ObjectKey
    lease: Lease | None
    """The loaded, verified object; ``None`` when it did not come."""


class TransferEngine:
    """Moves objects for one worker. Every method is for the engine thread and none of them waits for storage.

    Args:
        tiers: the fastest first.
        staging: a pool that nobody holds anything of.
        layouts: per pack name, the payload's layout.
    """

    def __init__(
        self,
        *,
        io: IoLoop,
        tiers: Sequence[Tier],
        staging: StagingPool,
        copier: BlockCopier,
        layouts: Mapping[str, PackLayout],
        counters: Counters,
    ) -> None:
        self._io = io
        self._tiers = {tier.name: tier for tier in tiers}
        self._staging = staging
        self._copier = copier
        self._layouts = layouts
        self._counters = counters
        self.jobs = JobTable(counters)
        """Everything that is under way."""
        self._wanted: dict[int, _WantedLoad] = {}
        """Per generation; changed by the engine thread only."""
        self._arrivals: deque[_Arrival] = deque()
        self._arrived = threading.Event()
        uses = staging_uses((tier.config.staging_share, tier.compresses) for tier in tiers)
        self._shares = share_out(
            staging,
            {tier.name: use for tier, use in zip(tiers, uses, strict=True)},
            max(layout.payload_bytes for layout in layouts.values()),
        )
        for tier in tiers:
            tier.staging = self._shares[tier.name]
        # One batch of a tier at a time waits for leases, so that many small ones cannot keep a large one waiting.
        self._leasing = {tier.name: asyncio.Lock() for tier in tiers}
        self._stores = Stores(
            io=io,
            tiers=tiers,
            staging=staging,
            shares=self._shares,
            gathered_limit_bytes=gathered_limit_bytes(staging.store_limit_bytes, uses),
            copier=copier,
            layouts=layouts,
            jobs=self.jobs,
            counters=counters,
        )

    @property
    def has_wanted_loads(self) -> bool:
        """Whether some request waits for a load."""
        return bool(self._wanted)

    def submit_load(self, job: LoadJob) -> None:
        """Start a load. Its result comes from :meth:`poll`, at the latest after its deadline.

        The deadline counts from here, the wait for the tier's turn included.
        """
        tier = self._tiers[job.tier]
        nbytes = sum(object_bytes(self._layouts[o.key.pack].payload_bytes) for o in job.objects)
        seconds = max(0.0, tier.limits.load_seconds(nbytes) - job.waited_seconds)
        entry = self.jobs.submit("load", job.tier, time.monotonic() + seconds)
        objects = {item.key: item for item in job.objects}
        load = self._wanted[entry.generation] = _WantedLoad(job.job_id, entry, job.objects, job.waited_seconds, objects)
        if not objects:
            self.jobs.start(entry)  # and it is done with that
        elif not tier.health.admits("load"):
            load.refused = True
            return
        self._io.submit(self._load(entry, tier, job.objects)).add_done_callback(log_unexpected)

    def cancel_load(self, job_id: int) -> None:
        """Stop wanting a load: its objects no longer touch the KV cache. The next :meth:`poll` reports it."""
        for load in self._wanted.values():
            if load.job_id == job_id and not load.job.ended:
                self.jobs.end(load.job, JobState.CANCELLED)

    def submit_stores(self, objects: Sequence[TransferObject]) -> None:
        """Copy the objects' blocks to staging now and store them later; what finds no room is dropped and counted."""
        self._stores.submit(objects)

    def poll(self) -> list[LoadResult]:
        """Copy arrived objects into the KV cache and return the loads that ended since the last call."""
        self._arrived.clear()
        while self._arrivals:
            self._take(self._arrivals.popleft())
        self._stores.start_kept()
        now = time.monotonic()
        ended = []
        for load in list(self._wanted.values()):
            verdict = load.job.verdict or load.due_verdict(now)
            if verdict is not None:
                ended.append(self._publish(load, verdict))
        return ended

    def take_store_results(self) -> list[StoreResult]:
        """Return what became of stores since the last call: whether a tier has it, as soon as that is known."""
        return self._stores.take_results()

    def wait_for_arrival(self, seconds: float) -> None:
        """Wait until an object has arrived, at most ``seconds``. For a step in which the engine has no other work."""
        self._arrived.wait(seconds)

    def drain_stores(self, seconds: float) -> bool:
        """Wait for stores on their way, at most ``seconds``. Returns whether all have ended."""
        return self._stores.drain(seconds)

    def close(self) -> None:
        """Drop all wanted loads. Objects still on their way keep their leases until their calls end."""
        for load in self._wanted.values():
            if not load.job.ended:
                self.jobs.end(load.job, JobState.CANCELLED)
        self._wanted.clear()
        while self._arrivals:
            self._take(self._arrivals.popleft())
        self._stores.close()

    def _publish(self, load: _WantedLoad, verdict: JobState) -> LoadResult:
        """End a load, unless it has been cancelled, and return its result."""
        del self._wanted[load.job.generation]
        if not load.job.ended:
            self.jobs.end(load.job, verdict)
        result = load.result(verdict)
        if verdict is JobState.TIMED_OUT:
            self._counters.add("load_timeouts", load.job.tier)
            if not load.waited_seconds:  # one that got less than its tier's deadline says little about the tier
                self._tiers[load.job.tier].health.timed_out("load", result.failed_keys[0])
        return result

    def _take(self, arrival: _Arrival) -> None:
        load = self._wanted.get(arrival.generation)
        if load is None or load.job.ended:
            if arrival.lease is not None:
                self._counters.add("load_late", arrival.tier)
                arrival.lease.release()
            return
        item = load.waiting_for.pop(arrival.key)
        if arrival.lease is None:
            load.failed.append(arrival.key)
            return
        self._copier.scatter(self._layouts[item.key.pack], item.blocks, arrival.lease.tensor[HEADER_BYTES:])
        if not self._stores.keep(arrival.key, arrival.lease, arrival.tier):
            arrival.lease.release()

    async def _load(self, job: Job, tier: Tier, objects: Sequence[TransferObject]) -> None:
        """Load a job's objects in batches, as many at once as the tier allows. Nobody cancels it."""
        await run_all(self._load_batch(job, tier, batch) for batch in in_batches(objects, self._layouts))

    async def _load_batch(self, job: Job, tier: Tier, batch: Sequence[TransferObject]) -> None:
        """Load a batch, unless its job has ended when its turn comes. Cancelled, it ends when its call has."""
        staged: list[StagedObject] = []
        outcomes: list[LoadOutcome | None] = []
        try:
            async with tier.load_slots.held(job.deadline):
                staged = await self._stage(job, tier, batch)
                if staged:
                    outcomes = await tier.load(staged)
        finally:
            for one in staged:
                if one.scratch is not None:
                    one.scratch.release()
            self.jobs.let_go(job, _leases_of(staged))
            late = job.ended  # an engine that has nothing else to do might never poll again
            for index, item in enumerate(batch):
                lease = staged[index].lease if index < len(staged) else None
                hit = index < len(outcomes) and outcomes[index] is LoadOutcome.HIT
                if lease is not None and (late or not hit):
                    lease.release()
                if late:
                    self._counters.add("load_late", tier.name, int(hit))
                else:
                    self._arrivals.append(_Arrival(job.generation, tier.name, item.key, lease if hit else None))
            self._arrived.set()

    async def _stage(self, job: Job, tier: Tier, batch: Sequence[TransferObject]) -> list[StagedObject]:
        """Take memory for a batch, which the job holds then; none, and nothing taken, once the job has ended.

        Cancelled, it has taken nothing.
        """
        if not self.jobs.start(job):
            return []
        sizes = [object_bytes(self._layouts[item.key.pack].payload_bytes) for item in batch]
        if tier.compresses:
            sizes += sizes  # a second buffer each, for the bytes as they are stored
        async with self._leasing[tier.name]:
            leases = await self._staging.acquire_all(sizes, self._shares[tier.name].loads)
        if not self.jobs.hold(job, len(leases)):
            for lease in leases:
                lease.release()
            return []
        return [
            StagedObject(item.key, lease, scratch)
            for item, lease, scratch in zip_longest(batch, leases[: len(batch)], leases[len(batch) :])
        ]


def _leases_of(staged: Sequence[StagedObject]) -> int:
    return sum(2 if one.scratch is not None else 1 for one in staged)
