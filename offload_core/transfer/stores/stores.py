"""The stores of a worker: from the KV cache to every tier that takes an object, and from a slower tier to a faster one.

Each store has one staging lease, shared by all tiers that take the object. If one tier alone takes the object and lends
its memory, the store has that memory in place of a lease. A tier is charged for the object from its offer until the
tier releases it. The last tier's release frees the lease (invariant I3). So a hung tier holds only its own share of the
staging memory: the other tiers' calls go on, and their results are reported at once. If a tier's share is full, its
longest waiting objects are dropped.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any

from offload_core.api.backend import StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.memory.block_copier import COPY_LOOK_SECONDS, BlockCopier, CopyEnd
from offload_core.memory.byte_budget import ByteBudget
from offload_core.memory.payload_layout import PackLayout
from offload_core.memory.staging_pool import Lease, StagingPool
from offload_core.memory.staging_shares import TierShare
from offload_core.memory.staging_size import in_batches, lease_bytes
from offload_core.objects.format import HEADER_BYTES, object_bytes
from offload_core.runtime.io_loop import IoLoop, log_unexpected
from offload_core.runtime.metrics import Counters
from offload_core.tiers.calls.lent_objects import LentObject, WantedObject
from offload_core.tiers.opening import TierProcesses
from offload_core.tiers.staged_object import StagedObject
from offload_core.tiers.tier import Tier
from offload_core.transfer.batches import Layouts, TransferObject
from offload_core.transfer.call_size import store_size_of
from offload_core.transfer.jobs import JobTable
from offload_core.transfer.stores.pending_store import PendingStore, StoreResult
from offload_core.transfer.stores.sealing import Sealing
from offload_core.transfer.stores.store_grants import StoreGrants
from offload_core.transfer.stores.store_queue import StoreBatch
from offload_core.transfer.stores.tier_writer import TierWriter
from offload_core.transfer.stores.writer_choice import WriterChoice

_SEALED_BATCHES = 4
"""Batches that one message seals, if the tiers are in another process."""
_Parts = Sequence[tuple[TierWriter, StoreBatch[PendingStore]]]
"""Per tier, the part of one batch that it takes."""


class Stores:
    """All objects on their way to tiers. Every method is for the engine thread, and only ``drain`` waits.

    Args:
        tiers: the fastest first.
        shares: per tier name.
        gather_limit_bytes: upper limit for the leases of all stores together, without the compressed bytes' leases.
        jobs: the table to which every batch adds one job per tier.
        processes: the processes of the tiers, which also seal objects; ``None`` if the tiers are in this process.
    """

    def __init__(
        self,
        *,
        io: IoLoop,
        tiers: Sequence[Tier],
        staging: StagingPool,
        shares: Mapping[str, TierShare],
        gather_limit_bytes: int,
        copier: BlockCopier,
        layouts: Layouts,
        jobs: JobTable,
        counters: Counters,
        processes: TierProcesses | None = None,
    ) -> None:
        self._io = io
        self._lock = threading.Condition()
        """Guards the writers and their objects; notified when no object is left."""
        self._writers = [
            TierWriter(
                tier,
                shares[tier.name],
                call_size=store_size_of(
                    tier, min(shares[tier.name].stores.limit_bytes, (1 + tier.encodes) * gather_limit_bytes)
                ),
                jobs=jobs,
                counters=counters,
                lock=self._lock,
            )
            for tier in tiers
        ]
        self._batch_times = _SEALED_BATCHES if processes is not None else 1
        self._writer_of = {writer.name: writer for writer in self._writers}
        self._choice = WriterChoice(self._writers, counters)
        self._staging = staging
        self._copier = copier
        self._layouts = layouts
        self._counters = counters
        self.budget = ByteBudget(gather_limit_bytes)
        """The bytes that the leases of all stores may hold together."""
        self._announced: dict[ObjectKey, list[TierWriter]] = {}
        """Per key of an object that will be submitted next, the writers that take it."""
        self._grants = StoreGrants()
        self._ages = count()
        self._pending = 0  # objects on their way; under the lock
        self._promotions: list[tuple[PendingStore, list[TierWriter]]] = []
        self._results: deque[StoreResult] = deque()
        self._running: set[Future[None]] = set()
        self._sealing = Sealing(copier, processes)

    def submit(self, objects: Sequence[TransferObject], *, busy: bool = False) -> None:
        """Copy the objects' blocks now, to staging or lent memory, and store them later on the tiers that take them.

        A copy on a device goes on after this call; the engine may reuse the blocks nevertheless.

        Write policies and circuit breakers decide before the copy. If staging is full, the oldest waiting stores are
        dropped, though not for a spare object. An object that no tier takes, or that still has no staging memory, is
        dropped too. All drops are counted.

        Args:
            busy: whether requests wait for loads. A tier with a limit then takes no spare objects.
        """
        submitted = time.monotonic()
        new: list[tuple[PendingStore, list[TierWriter]]] = []
        for item in objects:
            layout = self._layouts.of(item)
            nbytes = object_bytes(layout.payload_bytes)
            willing = self._announced.pop(item.key, None)
            if willing is None:
                willing = self._choice.for_offered(item, busy)
            granted = self._grants.take(item.key)
            if isinstance(granted, StoreOutcome):
                self._ended_before_copy(item.key, willing, granted)
                continue
            if not self._copier.has_room(layout.payload_bytes):  # before an object that waits is dropped for it
                if granted is not None:
                    granted.release()
                self._choice.count(willing, "store_dropped")
                self._results.append(StoreResult(item.key, stored=False))
                continue
            if granted is not None:
                if (store := self._fill_lent(item, layout, willing, granted)) is not None:
                    new.append((store, willing))
                continue
            may_drop = not item.spare or not all(writer.limits_spares for writer in willing)
            writers = self._choice.charge(willing, nbytes, "store_dropped", may_drop=may_drop)
            lease = self._lease_to_gather(nbytes, may_drop=may_drop) if writers else None
            if lease is not None and (store := self._gather(item, layout, writers, lease)) is not None:
                new.append((store, writers))
                continue
            if lease is not None:
                lease.release()
                self.budget.give_back(lease_bytes(nbytes))
            self._choice.discharge(writers, nbytes, "store_dropped")
            self._results.append(StoreResult(item.key, stored=False))
        self._begin(new, submitted, copied=self._copier.gathers_end() if new else None)

    def announce(
        self, objects: Sequence[TransferObject], *, busy: bool, after_touch: Callable[[str, Callable[[], None]], None]
    ) -> None:
        """Ask the tiers that lend memory for that of objects that will be submitted next.

        An object that several tiers take is copied to staging memory once, so nothing is asked for it.

        Args:
            busy: as for :meth:`submit`.
            after_touch: calls a function once the tier of a name knows the order of eviction.
        """
        self._announced.clear()
        self._grants.drop()
        wanted: dict[TierWriter, list[WantedObject]] = {}
        for item in objects:
            if item.key not in self._announced:
                willing = self._announced[item.key] = self._choice.for_offered(item, busy)
                if len(willing) == 1 and willing[0].tier.lending.is_possible and willing[0].admits():
                    nbytes = self._layouts.stored_bytes(item)
                    wanted.setdefault(willing[0], []).append(WantedObject(item.key, nbytes, item.spare))
        for writer, some in wanted.items():
            for request, part in self._grants.expect(some):
                after_touch(writer.name, partial(self._grants.start, writer.tier, request, part))

    def promote(self, key: ObjectKey, lease: Lease | LentObject, source: str) -> bool:
        """Offer an object that was loaded and verified from the tier ``source`` to the other tiers, in its lease.

        An object in lent memory is copied to staging memory for them.

        Every faster tier takes it, if its configuration keys ``promote`` and ``write_policy`` allow. For a slower tier
        the load is a use. A promotion drops no waiting store, since its object is on a tier already. The stores begin
        with the next call of :meth:`start_promotions`.

        Returns:
            ``True`` if the stores take the lease; otherwise the caller still owns it.
        """
        willing = self._choice.for_loaded(key, source)
        writers = self._choice.charge(willing, lease.nbytes, "promotions_dropped", may_drop=False)
        if not writers:
            return False
        if not self.budget.try_take(lease_bytes(lease.nbytes)):
            self._choice.discharge(writers, lease.nbytes, "promotions_dropped")
            return False
        staged = self._staging_for_promotion(lease)
        if staged is None:
            self.budget.give_back(lease_bytes(lease.nbytes))
            self._choice.discharge(writers, lease.nbytes, "promotions_dropped")
            return False
        self._promotions.append((self._new_store(StagedObject(key, staged), sealed=True, promotion=True), writers))
        return True

    def _staging_for_promotion(self, lease: Lease | LentObject) -> Lease | None:
        """Return a store's lease with the object in ``lease``, which is used up; ``None`` if there is no room."""
        if not isinstance(lease, LentObject):
            return lease if self._staging.convert_to_store(lease) else None
        staged = self._staging.try_acquire(lease.nbytes, for_store=True)
        if staged is not None:
            staged.view[:] = lease.view
            lease.release()
        return staged

    def start_promotions(self) -> None:
        """Start the stores of promoted objects."""
        if self._promotions:
            promotions, self._promotions = self._promotions, []
            self._begin(promotions, time.monotonic())

    def take_results(self) -> list[StoreResult]:
        """Return the results of submitted objects since the last call. Each object has one result.

        A stored object has its result as soon as one tier has it. Otherwise the result follows when the store has
        ended, was dropped or has timed out on every tier.
        """
        results: list[StoreResult] = []
        while self._results:
            results.append(self._results.popleft())
        return results

    @property
    def has_pending(self) -> bool:
        """True if some tier still holds an object, even if its result is known."""
        return self._pending > 0

    def drain(self, seconds: float) -> bool:
        """Wait for all pending stores, at most ``seconds``. Returns whether all have really ended."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._pending, seconds)

    def close(self) -> None:
        """Drop waiting objects. Objects in a tier's call keep their leases until the call ends."""
        self._grants.drop()
        with self._lock:
            for writer in self._writers:
                writer.cancel_all()
        for writer in self._writers:
            self._io.loop.call_soon_threadsafe(writer.stop_timer)
        self._sealing.close()

    def _ended_before_copy(self, key: ObjectKey, willing: Sequence[TierWriter], outcome: StoreOutcome) -> None:
        """Report an object whose tier needs no copy of it, or rejects it."""
        stored = outcome is StoreOutcome.ALREADY_PRESENT
        if stored:
            for writer in willing:
                writer.policy.has_stored(key)
        self._results.append(StoreResult(key, stored))

    def _fill_lent(
        self, item: TransferObject, layout: PackLayout, willing: Sequence[TierWriter], lent: LentObject
    ) -> PendingStore | None:
        """Copy an object's blocks into the memory that its only tier has lent; ``None`` if it is dropped."""
        writers = self._choice.charge(willing, lent.nbytes, "store_dropped", may_drop=not item.spare)
        if writers and (store := self._gather(item, layout, writers, lent)) is not None:
            self._counters.add("store_lent", writers[0].name)
            return store
        lent.release()
        self._choice.discharge(writers, lent.nbytes, "store_dropped")
        self._results.append(StoreResult(item.key, stored=False))
        return None

    def _gather(
        self, item: TransferObject, layout: PackLayout, writers: Sequence[TierWriter], memory: Lease | LentObject
    ) -> PendingStore | None:
        """Copy an object's blocks into its memory; ``None`` if that is refused, see :meth:`Sealing.gather`."""
        by_tier = len(writers) == 1 and writers[0].tier.seals_stores
        gathered = self._sealing.gather(item, layout, memory, by_tier=by_tier)
        return None if gathered is None else self._new_store(*gathered, promotion=False)

    def _lease_to_gather(self, nbytes: int, *, may_drop: bool) -> Lease | None:
        """Lease staging memory; if it is full, drop the oldest waiting objects."""
        while (lease := self._try_lease(nbytes)) is None and may_drop and self._drop_oldest():
            pass
        return lease

    def _try_lease(self, nbytes: int) -> Lease | None:
        if not self.budget.try_take(lease_bytes(nbytes)):
            return None
        lease = self._staging.try_acquire(nbytes, for_store=True)
        if lease is None:
            self.budget.give_back(lease_bytes(nbytes))
        return lease

    def _drop_oldest(self) -> bool:
        """Drop the oldest object that only waits, at all its tiers; returns whether there was one."""
        with self._lock:
            waiting = heapq.merge(*(writer.waiting() for writer in self._writers), key=lambda store: store.age)
            oldest = next((store for store in waiting if store.only_waits and store.holds_staging), None)
            if oldest is None:
                return False
            for name, batch in oldest.holders.items():
                self._writer_of[name].drop(batch, oldest)
        return True

    def _new_store(self, staged: StagedObject, sealed: bool, *, promotion: bool) -> PendingStore:
        return PendingStore(
            next(self._ages),
            staged,
            None if isinstance(staged.lease, LentObject) else self.budget,
            promotion=promotion,
            sealed=sealed,
            report=self._results.append,
            on_released=self._store_ended,
        )

    def _store_ended(self) -> None:
        """Count a store as ended. The caller holds the lock."""
        self._pending -= 1
        if not self._pending:
            self._lock.notify_all()

    def _begin(
        self,
        new: Sequence[tuple[PendingStore, list[TierWriter]]],
        submitted: float,
        *,
        copied: CopyEnd | None = None,
    ) -> None:
        """Add objects to the writers of the tiers that are charged for them.

        Args:
            copied: the end of the copies that fill the objects' memory; ``None`` if they are complete.
        """
        writers_of = dict(new)
        batches: list[tuple[list[PendingStore], _Parts]] = []
        with self._lock:  # no tier may decide on an object before all its tiers are assigned
            self._pending += len(writers_of)
            for batch in in_batches(list(writers_of), _payload_bytes, self._batch_times):
                shares = [
                    (writer, [store for store in batch if writer in writers_of[store]]) for writer in self._writers
                ]
                batches.append((batch, [(writer, writer.begin(share, submitted)) for writer, share in shares if share]))
        for writer in {writer for _, parts in batches for writer, _ in parts}:
            if writer.needs_timer:
                self._io.loop.call_soon_threadsafe(writer.start_timer)
        for batch, parts in batches:
            if copied is None and all(store.sealed or store.staged.unsealed for store in batch):
                for writer, part in parts:
                    writer.prepared(part)
            else:
                self._spawn(self._prepare(batch, parts, copied))

    async def _prepare(self, stores: Sequence[PendingStore], parts: _Parts, copied: CopyEnd | None) -> None:
        """Seal a batch once its bytes are there, and let it wait for the tiers that take it. Never cancelled."""
        sealed = False
        try:
            while copied is not None and not copied.has_passed():  # noqa: ASYNC110 - a device wakes no event loop
                await asyncio.sleep(COPY_LOOK_SECONDS)
            if not all(batch.expired for _, batch in parts):
                if to_seal := [store.staged for store in stores if not (store.sealed or store.staged.unsealed)]:
                    await self._sealing.seal(to_seal)
                sealed = True
        finally:
            for writer, batch in parts:
                writer.prepared(batch, sealed=sealed)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Start a coroutine on the I/O loop, from any thread."""
        future = self._io.submit(coroutine)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        future.add_done_callback(log_unexpected)


def _payload_bytes(store: PendingStore) -> int:
    return store.nbytes - HEADER_BYTES
