"""The stores of a worker: down to every tier that takes an object, and up from a slower tier to a faster one.

Each store has one staging lease, shared by all tiers that take it. A tier is charged for it while its own call lasts;
the lease is released when the last call has really ended (invariant I3). So a tier that hangs holds its share of the
staging memory and nothing else: the others' calls are not cancelled, and what one of them has stored is reported then.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

from offload_core import object_format
from offload_core.keys import ObjectKey
from offload_core.object_format import HEADER_BYTES, object_bytes
from offload_core.packs import BlockCopier, PackLayout
from offload_core.runtime import DaemonExecutor, IoLoop, log_unexpected, run_all
from offload_core.staging import Lease, StagingPool
from offload_core.staging_shares import TierShare
from offload_core.staging_size import lease_bytes
from offload_core.stats import Counters
from offload_core.tier import StagedObject, Tier
from offload_core.transfer_objects import TransferObject, in_batches
from offload_core.write_policy import WritePolicy


@dataclass(frozen=True)
class StoreResult:
    """Whether an object is on at least one tier now."""

    key: ObjectKey
    stored: bool


@dataclass(frozen=True, eq=False)
class _Taker:
    """A tier, with what decides whether it is given an object."""

    tier: Tier
    policy: WritePolicy
    share: TierShare

    @property
    def name(self) -> str:
        return self.tier.name


class _Gathered:
    """Bytes that the leases of all stores hold. Thread-safe.

    Args:
        limit_bytes: what they may hold at most.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._nbytes = 0

    def try_add(self, nbytes: int) -> bool:
        """Count a lease; ``False``, and nothing counted, at the limit."""
        with self._lock:
            if self._nbytes + lease_bytes(nbytes) > self._limit_bytes:
                return False
            self._nbytes += lease_bytes(nbytes)
            return True

    def remove(self, nbytes: int) -> None:
        """Undo :meth:`try_add`."""
        with self._lock:
            self._nbytes -= lease_bytes(nbytes)


class _OpenStore:
    """One object on its way to ``takers``, each of which is charged for it. For the I/O loop only."""

    def __init__(
        self,
        staged: StagedObject,
        takers: Sequence[_Taker],
        gathered: _Gathered,
        report: Callable[[StoreResult], None] | None,
    ) -> None:
        self.staged = staged
        self.key = staged.key
        self.takers = takers
        self._gathered = gathered
        self._report = report
        self._running = len(takers)

    def end(self, taker: _Taker, stored: bool) -> None:
        """Note that the call of ``taker`` has really ended; to be called once for each taker."""
        taker.share.end_store(self.staged.lease.nbytes)
        if stored:
            taker.policy.has_stored(self.key)
        self._running -= 1
        if self._report is not None and (stored or not self._running):
            self._report(StoreResult(self.key, stored))
            self._report = None
        if not self._running:
            self._gathered.remove(self.staged.lease.nbytes)
            self.staged.lease.release()


class Stores:
    """Everything that is on its way to tiers. All methods are for the engine thread, and none but ``drain`` waits.

    Args:
        tiers: the fastest first.
        shares: per tier's name.
        gathered_limit_bytes: what the leases of all stores may hold together, beside those of tiers that compress.
        layouts: per pack name, the payload's layout.
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
        counters: Counters,
    ) -> None:
        self._io = io
        self._takers = [_Taker(tier, WritePolicy(tier.keys.write_policy), shares[tier.name]) for tier in tiers]
        self._positions = {tier.name: position for position, tier in enumerate(tiers)}
        self._staging = staging
        self._copier = copier
        self._layouts = layouts
        self._counters = counters
        self._gathered = _Gathered(gathered_limit_bytes)
        self._kept: list[_OpenStore] = []
        self._results: deque[StoreResult] = deque()
        self._running: set[Future[None]] = set()
        self._sealers = DaemonExecutor(2, "offload-seal")

    def submit(self, objects: Sequence[TransferObject]) -> None:
        """Copy the objects' blocks to staging now and store them later, each on the tiers that take it.

        The write policies are asked before anything is copied. What finds no room is dropped and counted.
        """
        begun: list[_OpenStore] = []
        for item in objects:
            layout = self._layouts[item.key.pack]
            nbytes = object_bytes(layout.payload_bytes)
            takers = self._charged(self._asked(item.key), nbytes, "store_dropped")
            lease = self._lease_to_gather(nbytes) if takers else None
            if lease is None:
                self._drop(takers, nbytes, "store_dropped")
                self._results.append(StoreResult(item.key, stored=False))
                continue
            self._copier.gather(layout, item.blocks, lease.tensor[HEADER_BYTES:])
            begun.append(_OpenStore(StagedObject(item.key, lease), takers, self._gathered, self._results.append))
        self._start(begun, sealed=False)

    def keep(self, key: ObjectKey, lease: Lease, source: str) -> bool:
        """Offer an object that was loaded and verified from the tier ``source`` to the others, from the same lease.

        Every faster tier keeps it, as far as its keys ``promote`` and ``write_policy`` allow; to slower ones it is a
        touch. The stores begin with the next call of :meth:`start_kept`.

        Returns:
            Whether the lease is taken over; else it is still the caller's.
        """
        takers = self._charged(self._asked_to_keep(key, source), lease.nbytes, "promotions_dropped")
        if not takers:
            return False
        if not self._gathered.try_add(lease.nbytes):
            self._drop(takers, lease.nbytes, "promotions_dropped")
            return False
        if not self._staging.keep_for_store(lease):
            self._gathered.remove(lease.nbytes)
            self._drop(takers, lease.nbytes, "promotions_dropped")
            return False
        self._kept.append(_OpenStore(StagedObject(key, lease), takers, self._gathered, report=None))
        return True

    def start_kept(self) -> None:
        """Start to store what :meth:`keep` has taken over."""
        kept, self._kept = self._kept, []
        self._start(kept, sealed=True)

    def take_results(self) -> list[StoreResult]:
        """Return what became of submitted objects since the last call; each has one result.

        That is as soon as one tier has it, or when no tier has it and all have ended.
        """
        results: list[StoreResult] = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def drain(self, seconds: float) -> bool:
        """Wait for all that is on its way, at most ``seconds``. Returns whether all has ended."""
        return not wait(tuple(self._running), timeout=seconds).not_done

    def close(self) -> None:
        """End the threads once they are idle. What is on its way keeps its leases until its calls end."""
        self._sealers.shutdown()

    def _lease_to_gather(self, nbytes: int) -> Lease | None:
        if not self._gathered.try_add(nbytes):
            return None
        lease = self._staging.try_acquire(nbytes, for_store=True)
        if lease is None:
            self._gathered.remove(nbytes)
        return lease

    def _asked(self, key: ObjectKey) -> list[_Taker]:
        """Return the tiers that take an offered store."""
        takers = []
        for taker in self._takers:
            if taker.policy.takes_offered(key):
                takers.append(taker)
            else:
                self._counters.add("store_declined", taker.name)
        return takers

    def _asked_to_keep(self, key: ObjectKey, source: str) -> list[_Taker]:
        """Return the tiers that take what was loaded from ``source``."""
        from_position = self._positions[source]
        takers = []
        for position, taker in enumerate(self._takers):
            if position == from_position:
                continue
            faster = position < from_position
            wanted = taker.policy.takes_loaded(key, promoted=faster)  # a touch, whatever becomes of it
            if wanted and (taker.tier.keys.promote or not faster):
                takers.append(taker)
        return takers

    def _charged(self, takers: Sequence[_Taker], nbytes: int, counter: str) -> list[_Taker]:
        """Charge each tier that has room in its share, and return these; the others are counted."""
        charged = []
        for taker in takers:
            if taker.share.try_charge_store(nbytes):
                charged.append(taker)
            else:
                self._counters.add(counter, taker.name)
        return charged

    def _drop(self, takers: Sequence[_Taker], nbytes: int, counter: str) -> None:
        for taker in takers:
            taker.share.end_store(nbytes)
            self._counters.add(counter, taker.name)

    def _start(self, stores: Sequence[_OpenStore], *, sealed: bool) -> None:
        if stores:
            future = self._io.submit(self._store(stores, sealed))
            self._running.add(future)
            future.add_done_callback(self._running.discard)
            future.add_done_callback(log_unexpected)

    async def _store(self, stores: Sequence[_OpenStore], sealed: bool) -> None:
        """Store in batches; nobody cancels it, and an unexpected error in one batch or tier leaves the others alone."""
        await run_all(self._store_batch(batch, sealed) for batch in in_batches(stores, self._layouts))

    async def _store_batch(self, batch: Sequence[_OpenStore], sealed: bool) -> None:
        """Seal a batch and give each tier what it takes of it. Cancelled, it ends when the tiers' calls have ended."""
        if not sealed:
            objects = [store.staged for store in batch]
            try:
                await asyncio.get_running_loop().run_in_executor(self._sealers, _seal_all, objects)
            except BaseException:
                for store in batch:
                    for taker in store.takers:
                        store.end(taker, stored=False)
                raise
        parts = ((taker, [store for store in batch if taker in store.takers]) for taker in self._takers)
        await run_all(self._store_on(taker, part, promotion=sealed) for taker, part in parts if part)

    async def _store_on(self, taker: _Taker, part: Sequence[_OpenStore], promotion: bool) -> None:
        """Store on one tier; when its call has ended, in whichever way, it is no longer charged."""
        stored: list[bool] = []
        try:
            stored = await taker.tier.store([store.staged for store in part])
        finally:
            if promotion:
                self._counters.add("promotions", taker.name, stored.count(True))
            for index, store in enumerate(part):
                store.end(taker, index < len(stored) and stored[index])


def _seal_all(batch: Sequence[StagedObject]) -> None:
    for item in batch:
        object_format.seal(item.lease.view, item.key)
