"""The transfer engine of a worker: loads and stores between the KV cache and the tiers.

Two threads meet here. The *engine thread* calls :class:`TransferEngine`; it alone copies between staging and the KV
cache (invariant I2). The *I/O loop* moves bytes between staging and the tiers. They exchange staging leases: a store's
lease goes from the engine thread to the loop, a load's lease the other way, and back where a faster tier is to keep
what it holds; whoever holds it releases it, once (I3).

A load job is *wanted* until it is finished, failed, timed out or cancelled. Objects that arrive for a job that is no
longer wanted are dropped, at the latest by the engine thread before it would copy them, so that they never touch a
block that belongs to another request by then.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal

from offload_core.backend import LoadOutcome
from offload_core.keys import ObjectKey
from offload_core.object_format import HEADER_BYTES, object_bytes
from offload_core.packs import BlockCopier, PackLayout
from offload_core.runtime import IoLoop, log_unexpected, run_all
from offload_core.staging import Lease, StagingPool
from offload_core.staging_shares import share_out
from offload_core.staging_size import gathered_limit_bytes, staging_uses
from offload_core.stats import Counters
from offload_core.stores import StoreResult, Stores
from offload_core.tier import StagedObject, Tier
from offload_core.transfer_objects import TransferObject, in_batches

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadJob:
    """Everything that one request waits for, from one tier."""

    job_id: int
    tier: str
    objects: tuple[TransferObject, ...]


@dataclass(frozen=True)
class LoadResult:
    """How a load job ended. ``failed_keys`` are those to mistrust: none when it was loaded or cancelled."""

    job_id: int
    status: Literal["loaded", "failed", "timed out", "cancelled"]
    failed_keys: tuple[ObjectKey, ...] = ()


@dataclass
class _WantedLoad:
    tier: str
    deadline: float
    waiting_for: dict[ObjectKey, TransferObject]
    failed: list[ObjectKey] = field(default_factory=list)
    cancelled: bool = False

    def result(self, job_id: int, now: float) -> LoadResult | None:
        """Return how the load has ended, or ``None`` while it goes on."""
        if self.cancelled:
            return LoadResult(job_id, "cancelled")
        if self.waiting_for:
            missing = (*self.failed, *self.waiting_for)
            return LoadResult(job_id, "timed out", missing) if now >= self.deadline else None
        # A load that has failed goes on to its end, so that all that is damaged is found, and stored anew, at once.
        return LoadResult(job_id, "failed" if self.failed else "loaded", tuple(self.failed))


@dataclass(frozen=True)
class _Arrival:
    job_id: int
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
        self._wanted: dict[int, _WantedLoad] = {}
        self._arrivals: deque[_Arrival] = deque()
        self._arrived = threading.Event()
        uses = staging_uses((tier.keys.staging_share, tier.compresses) for tier in tiers)
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
            counters=counters,
        )

    @property
    def has_wanted_loads(self) -> bool:
        """Whether some request waits for a load."""
        return bool(self._wanted)

    def submit_load(self, job: LoadJob) -> None:
        """Start a load. Its result comes from :meth:`poll`, at the latest after its deadline."""
        tier = self._tiers[job.tier]
        nbytes = sum(object_bytes(self._layouts[o.key.pack].payload_bytes) for o in job.objects)
        deadline = time.monotonic() + tier.limits.load_seconds(nbytes)
        self._wanted[job.job_id] = _WantedLoad(job.tier, deadline, {o.key: o for o in job.objects})
        self._io.submit(self._load(job, tier)).add_done_callback(log_unexpected)

    def cancel_load(self, job_id: int) -> None:
        """Stop wanting a load: its objects no longer touch the KV cache. The next :meth:`poll` reports it."""
        load = self._wanted.get(job_id)
        if load is not None:
            load.cancelled = True

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
        ended = [result for job_id, load in self._wanted.items() if (result := load.result(job_id, now))]
        for result in ended:
            load = self._wanted.pop(result.job_id)
            if result.status == "timed out":
                self._counters.add("load_timeouts", load.tier)
                logger.warning(
                    "tier %r: %d objects of a load missed its deadline (first: %s); its request is recomputed. Raise "
                    "load_timeout_seconds if the medium is merely slow.",
                    load.tier, len(result.failed_keys), result.failed_keys[0],
                )  # fmt: skip
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
        self._wanted.clear()
        self._stores.close()

    def _take(self, arrival: _Arrival) -> None:
        load = self._wanted.get(arrival.job_id)
        if load is None or load.cancelled:
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

    async def _load(self, job: LoadJob, tier: Tier) -> None:
        """Load a job's objects in batches, as many at once as the tier allows. Nobody cancels it."""
        await run_all(self._load_batch(job.job_id, tier, batch) for batch in in_batches(job.objects, self._layouts))

    async def _load_batch(self, job_id: int, tier: Tier, batch: Sequence[TransferObject]) -> None:
        """Load a batch, unless nobody wants it any more when its turn comes. Cancelled, it ends when its call has."""
        staged: list[StagedObject] = []
        outcomes: list[LoadOutcome | None] = []
        try:
            async with tier.load_slots:
                if job_id in self._wanted:  # a dict look-up, safe from this thread; poll() decides in the end
                    sizes = [object_bytes(self._layouts[item.key.pack].payload_bytes) for item in batch]
                    if tier.compresses:
                        sizes += sizes  # a second buffer each, for the bytes as they are stored
                    async with self._leasing[tier.name]:
                        leases = await self._staging.acquire_all(sizes, self._shares[tier.name].loads)
                    staged = [
                        StagedObject(item.key, lease, scratch)
                        for item, lease, scratch in zip_longest(batch, leases[: len(batch)], leases[len(batch) :])
                    ]
                    outcomes = await tier.load(staged)
        finally:
            for one in staged:
                if one.scratch is not None:
                    one.scratch.release()
            load = self._wanted.get(job_id)
            late = load is None or load.cancelled  # an engine that has nothing else to do might never poll again
            for index, item in enumerate(batch):
                lease = staged[index].lease if index < len(staged) else None
                hit = index < len(outcomes) and outcomes[index] is LoadOutcome.HIT
                if lease is not None and (late or not hit):
                    lease.release()
                if late:
                    self._counters.add("load_late", tier.name, int(hit))
                else:
                    self._arrivals.append(_Arrival(job_id, tier.name, item.key, lease if hit else None))
            self._arrived.set()
