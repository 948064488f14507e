"""The stores of a worker: down to every tier that takes an object, and up from a slower tier to a faster one.

Each store has one staging lease, shared by all tiers that take it. A tier is charged for it from the moment it is
offered until the tier lets go of it; the lease is released when the last one has (invariant I3). So a tier that hangs
holds its share of the staging memory and nothing else: the others' calls are not cancelled, and what one of them has
stored is reported then. Where a share is full, what has waited longest for that tier goes.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any

from offload_core.api.keys import ObjectKey
from offload_core.memory.block_copier import BlockCopier
from offload_core.memory.payload_layout import PackLayout
from offload_core.memory.staging_pool import Lease, StagingPool
from offload_core.memory.staging_shares import TierShare
from offload_core.objects import format as object_format
from offload_core.objects.format import HEADER_BYTES, object_bytes
from offload_core.runtime.io_loop import IoLoop, log_unexpected
from offload_core.runtime.metrics import Counters
from offload_core.runtime.threads import DaemonExecutor
from offload_core.tiers.staged_object import StagedObject
from offload_core.tiers.tier import Tier
from offload_core.transfer.batches import TransferObject, in_batches
from offload_core.transfer.jobs import JobTable
from offload_core.transfer.pending_store import GatheredBytes, OpenStore, StoreResult
from offload_core.transfer.store_queue import StoreBatch
from offload_core.transfer.tier_writer import StoreLane

_Parts = Sequence[tuple[StoreLane, StoreBatch[OpenStore]]]
"""What each tier takes of one batch."""


class Stores:
    """Everything that is on its way to tiers. All methods are for the engine thread, and none but ``drain`` waits.

    Args:
        tiers: the fastest first.
        shares: per tier's name.
        gathered_limit_bytes: what the leases of all stores may hold together, beside those of tiers that compress.
        layouts: per pack name, the payload's layout.
        jobs: gets a job for each tier and batch.
    """

    def __init__(
        self,
        *,
        io: IoLoop,
        tiers: Sequence[Tier],
        staging: StagingPool,
        shares: Mapping[str, TierShare],
        gathered_limit_bytes: int,
        copier: BlockCopier,
        layouts: Mapping[str, PackLayout],
        jobs: JobTable,
        counters: Counters,
    ) -> None:
        self._io = io
        self._lock = threading.Condition()
        """Guards the lanes and the objects in them; told when there are none left."""
        self._lanes = [
            StoreLane(tier, shares[tier.name], jobs=jobs, counters=counters, lock=self._lock, spawn=self._spawn)
            for tier in tiers
        ]
        self._lane_of = {lane.name: lane for lane in self._lanes}
        self._positions = {tier.name: position for position, tier in enumerate(tiers)}
        self._staging = staging
        self._copier = copier
        self._layouts = layouts
        self._counters = counters
        self._gathered = GatheredBytes(gathered_limit_bytes)
        self._ages = count()
        self._open = 0  # objects on their way; under the lock
        self._kept: list[tuple[OpenStore, list[StoreLane]]] = []
        self._results: deque[StoreResult] = deque()
        self._running: set[Future[None]] = set()
        self._sealers = DaemonExecutor(2, "offload-seal")

    def submit(self, objects: Sequence[TransferObject]) -> None:
        """Copy the objects' blocks to staging now and store them later, each on the tiers that take it.

        The write policies and the tiers' breakers are asked before anything is copied. To make room, the oldest stores
        that wait are dropped; what finds none all the same, or is refused, is dropped itself. All of it is counted.
        """
        submitted = time.monotonic()
        begun: list[tuple[OpenStore, list[StoreLane]]] = []
        for item in objects:
            layout = self._layouts[item.key.pack]
            nbytes = object_bytes(layout.payload_bytes)
            lanes = self._charged(self._asked(item.key), nbytes, "store_dropped", push_out=True)
            lease = self._lease_to_gather(nbytes) if lanes else None
            if lease is None:
                self._drop(lanes, nbytes, "store_dropped")
                self._results.append(StoreResult(item.key, stored=False))
                continue
            self._copier.gather(layout, item.blocks, lease.tensor[HEADER_BYTES:])
            begun.append((self._opened(item.key, lease, promotion=False), lanes))
        self._begin(begun, submitted, sealed=False)

    def keep(self, key: ObjectKey, lease: Lease, source: str) -> bool:
        """Offer an object that was loaded and verified from the tier ``source`` to the others, from the same lease.

        Every faster tier keeps it, as far as its keys ``promote`` and ``write_policy`` allow; to slower ones it is a
        touch. It pushes nothing out, since it is on a tier already. The stores begin with the next call of
        :meth:`start_kept`.

        Returns:
            Whether the lease is taken over; else it is still the caller's.
        """
        asked = self._asked_to_keep(key, source)
        lanes = self._charged(asked, lease.nbytes, "promotions_dropped", push_out=False)
        if not lanes:
            return False
        if not self._gathered.try_add(lease.nbytes):
            self._drop(lanes, lease.nbytes, "promotions_dropped")
            return False
        if not self._staging.keep_for_store(lease):
            self._gathered.remove(lease.nbytes)
            self._drop(lanes, lease.nbytes, "promotions_dropped")
            return False
        self._kept.append((self._opened(key, lease, promotion=True), lanes))
        return True

    def start_kept(self) -> None:
        """Start to store what :meth:`keep` has taken over."""
        kept, self._kept = self._kept, []
        self._begin(kept, time.monotonic(), sealed=True)

    def take_results(self) -> list[StoreResult]:
        """Return what became of submitted objects since the last call; each has one result.

        That is as soon as one tier has it, or when no tier has it and for each the store has ended, was dropped or has
        missed its deadline.
        """
        results: list[StoreResult] = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def drain(self, seconds: float) -> bool:
        """Wait for all that is on its way, at most ``seconds``. Returns whether all has really ended."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._open, seconds)

    def close(self) -> None:
        """Drop what waits. What tiers' calls have on its way keeps its leases until these end."""
        with self._lock:
            for lane in self._lanes:
                lane.abandon()
        for lane in self._lanes:
            self._io.loop.call_soon_threadsafe(lane.unwatch)
        self._sealers.shutdown()

    def _lease_to_gather(self, nbytes: int) -> Lease | None:
        """Lease staging memory, for which the oldest objects that wait are dropped where there is none."""
        while (lease := self._try_lease(nbytes)) is None and self._drop_oldest():
            pass
        return lease

    def _try_lease(self, nbytes: int) -> Lease | None:
        if not self._gathered.try_add(nbytes):
            return None
        lease = self._staging.try_acquire(nbytes, for_store=True)
        if lease is None:
            self._gathered.remove(nbytes)
        return lease

    def _drop_oldest(self) -> bool:
        """Drop the oldest object whose memory nothing uses, wherever it waits; returns whether there was one."""
        with self._lock:
            waiting = heapq.merge(*(lane.waiting() for lane in self._lanes), key=lambda store: store.age)
            oldest = next((store for store in waiting if store.only_waits), None)
            if oldest is None:
                return False
            for name, batch in oldest.holders.items():
                self._lane_of[name].drop(batch, oldest)
        return True

    def _asked(self, key: ObjectKey) -> list[StoreLane]:
        """Return the tiers that take an offered store."""
        lanes = []
        for lane in self._lanes:
            if lane.policy.takes_offered(key):
                lanes.append(lane)
            else:
                self._counters.add("store_declined", lane.name)
        return lanes

    def _asked_to_keep(self, key: ObjectKey, source: str) -> list[StoreLane]:
        """Return the tiers that take what was loaded from ``source``."""
        from_position = self._positions[source]
        lanes = []
        for position, lane in enumerate(self._lanes):
            if position == from_position:
                continue
            faster = position < from_position
            wanted = lane.policy.takes_loaded(key, promoted=faster)  # a touch, whatever becomes of it
            if wanted and (lane.tier.config.promote or not faster):
                lanes.append(lane)
        return lanes

    def _charged(self, lanes: Sequence[StoreLane], nbytes: int, counter: str, *, push_out: bool) -> list[StoreLane]:
        """Charge each tier that is well and has room in its share, and return these; the others are counted."""
        charged = []
        for lane in lanes:
            if lane.admits() and lane.charge(nbytes, push_out=push_out):
                charged.append(lane)
            else:
                self._counters.add(counter, lane.name)
        return charged

    def _drop(self, lanes: Sequence[StoreLane], nbytes: int, counter: str) -> None:
        for lane in lanes:
            lane.discharge(nbytes)
            self._counters.add(counter, lane.name)

    def _opened(self, key: ObjectKey, lease: Lease, *, promotion: bool) -> OpenStore:
        return OpenStore(
            next(self._ages),
            StagedObject(key, lease),
            self._gathered,
            promotion=promotion,
            report=self._results.append,
            released=self._has_ended,
        )

    def _has_ended(self) -> None:
        """Called under the lock."""
        self._open -= 1
        if not self._open:
            self._lock.notify_all()

    def _begin(self, begun: Sequence[tuple[OpenStore, list[StoreLane]]], submitted: float, *, sealed: bool) -> None:
        """Put objects, each with the tiers that are charged for it, into these tiers' lanes."""
        lanes_of = dict(begun)
        batches: list[tuple[list[OpenStore], _Parts]] = []
        with self._lock:  # no tier may decide before all are known that have to
            self._open += len(lanes_of)
            for batch in in_batches(list(lanes_of), self._layouts):
                parts = [(lane, [store for store in batch if lane in lanes_of[store]]) for lane in self._lanes]
                batches.append((batch, [(lane, lane.begin(part, submitted)) for lane, part in parts if part]))
        for batch, entered in batches:
            self._spawn(self._prepare(batch, entered, sealed))

    async def _prepare(self, stores: Sequence[OpenStore], parts: _Parts, sealed: bool) -> None:
        """Seal a batch and let it wait for the tiers that take it. Nobody cancels it."""
        for lane, _ in parts:
            lane.watch()
        well = sealed
        try:
            if not sealed and not all(batch.expired for _, batch in parts):
                objects = [store.staged for store in stores]
                await asyncio.get_running_loop().run_in_executor(self._sealers, _seal_all, objects)
                well = True
        finally:
            for lane, batch in parts:
                lane.prepared(batch, well=well)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Start a coroutine on the I/O loop, from any thread."""
        future = self._io.submit(coroutine)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        future.add_done_callback(log_unexpected)


def _seal_all(batch: Sequence[StagedObject]) -> None:
    for item in batch:
        object_format.seal(item.lease.view, item.key)
