"""The transfer engine of a worker: loads and stores between the KV cache and the tiers.

The *engine thread* calls :class:`TransferEngine`; it alone copies between staging and the KV cache (invariant I2). The
tiers move bytes between staging and their media, on the *I/O loop* of this process or in other processes. A staging
lease has one holder at a time, which releases it once (I3). During a call of a tier, the call is the holder.

Calls end on any thread. Without another process that is the I/O loop. With one, the engine thread takes the ends when
it polls. While it is busy or idle, the I/O loop does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

from offload_core.api.keys import ObjectKey
from offload_core.api.memory.pinned_memory import HostPinning
from offload_core.memory.block_copier import BlockCopier
from offload_core.memory.payload_layout import PackLayout
from offload_core.memory.staging_pool import StagingPool
from offload_core.memory.staging_shares import share_out
from offload_core.memory.staging_size import gather_limit_bytes, staging_uses
from offload_core.runtime.io_loop import IoLoop, log_unexpected
from offload_core.runtime.metrics import ALL_TIERS, Counters
from offload_core.tiers.opening import TierProcesses
from offload_core.tiers.tier import Tier
from offload_core.transfer.batches import Layouts, TransferObject
from offload_core.transfer.jobs import JobTable
from offload_core.transfer.loads import LoadJob, LoadResult, Loads
from offload_core.transfer.stores.pending_store import StoreResult
from offload_core.transfer.stores.stores import Stores

_WAIT_SECONDS = 0.05
"""Time between two looks for stores that ended without a message, since their process has ended."""


class TransferEngine:
    """Moves objects for one worker. Every method is for the engine thread, and none of them waits for storage.

    Args:
        tiers: the fastest first.
        staging: a pool without any leases.
        layouts: per pack name, the payload's layout. Objects of other packs bring their own.
        largest_payload_bytes: size of the largest payload; by default that of the packs.
        processes: the processes of the tiers; ``None`` if the tiers are in this process.
        pinning: pins the memory that tiers lend, if a device copies to and from it.
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
        largest_payload_bytes: int | None = None,
        processes: TierProcesses | None = None,
        pinning: HostPinning | None = None,
    ) -> None:
        self._io = io
        self._processes = processes
        self._staging = staging
        self._copier = copier
        self._attached = True
        self._counters = counters
        self._tiers = tiers
        self._touches: dict[str, Future[None]] = {}
        """Per tier, its last touch."""
        self._touched_tiers = [tier for tier in tiers if tier.capabilities.spares]
        self.jobs = JobTable(counters)
        """All loads and stores under way."""
        uses = staging_uses((tier.config.staging_share, tier.encodes) for tier in tiers)
        self._shares = share_out(
            staging,
            {tier.name: use for tier, use in zip(tiers, uses, strict=True)},
            largest_payload_bytes or max(layout.payload_bytes for layout in layouts.values()),
        )
        for tier in tiers:
            tier.staging = self._shares[tier.name]
            if not copier.takes_pageable_memory:
                tier.lending.lend_pinned_only(pinning if copier.takes_pinned_pieces else None)
        self._stores = Stores(
            io=io,
            tiers=tiers,
            staging=staging,
            shares=self._shares,
            gather_limit_bytes=gather_limit_bytes(staging.store_limit_bytes, uses),
            copier=copier,
            layouts=Layouts(layouts),
            jobs=self.jobs,
            counters=counters,
            processes=processes,
        )
        self._loads = Loads(
            tiers=tiers,
            staging=staging,
            shares=self._shares,
            copier=copier,
            layouts=Layouts(layouts),
            jobs=self.jobs,
            counters=counters,
            promote=self._stores.promote,
        )

        if processes is not None:
            processes.when_killed_and_not_gone(self._replace_staging)

    @property
    def has_active_loads(self) -> bool:
        """True if some request waits for a load."""
        return self._loads.has_active

    def submit_load(self, job: LoadJob) -> None:
        """Start a load. :meth:`poll` returns its result, at the latest after its deadline.

        The deadline counts from this call; waiting for a free load slot of the tier counts too.
        """
        self._loads.submit(job)
        if not self._attached:
            self._loads.cancel(job.job_id)

    def cancel_load(self, job_id: int) -> None:
        """Cancel a load: its objects no longer enter the KV cache. The next :meth:`poll` reports it."""
        self._loads.cancel(job_id)

    def copy_kept(self, tier: str, objects: Sequence[TransferObject]) -> None:
        """Copy objects of an earlier load with ``keep`` into their blocks, now.

        Raises:
            KeyError: an object is not kept; a defect of the caller.
        """
        self._loads.copy_kept(tier, objects)

    def give_back(self, job_ids: Iterable[int]) -> None:
        """Keep the objects of some loads no longer. Unknown loads are ignored."""
        self._loads.give_back(job_ids)

    def announce_stores(self, objects: Sequence[TransferObject]) -> None:
        """Ask the tiers that lend memory for that of objects that :meth:`submit_stores` will get next. Optional.

        Call it before the engine computes the step, so that the answers are there after it.
        """
        self._stores.announce(objects, busy=self._loads.has_active, after_touch=self._after_touch)

    def submit_stores(self, objects: Sequence[TransferObject]) -> None:
        """Copy the objects' blocks to staging now and store them later; without free staging, drop and count them."""
        self._receive()
        self._stores.submit(objects, busy=self._loads.has_active)

    def touch(self, keys: Sequence[ObjectKey], spare: Sequence[bool]) -> None:
        """Set the order of eviction on the tiers that know spare objects. Later stores evict in this order.

        Args:
            spare: one flag per key, as for :meth:`Backend.touch`.
        """
        for tier in self._touched_tiers:
            touch = self._touches[tier.name] = self._io.submit(tier.touch(keys, spare))
            touch.add_done_callback(log_unexpected)

    def _after_touch(self, tier: str, function: Callable[[], None]) -> None:
        """Call ``function`` after the last touch of a tier: now, or on the I/O loop."""
        touch = self._touches.get(tier)
        if touch is None or touch.done():
            function()
        else:
            touch.add_done_callback(lambda _: function())

    def poll(self) -> list[LoadResult]:
        """Copy arrived objects into the KV cache and return the loads that ended since the last call."""
        self._receive()
        self._loads.scatter_arrivals()
        self._stores.start_promotions()
        return self._loads.take_ended()

    @property
    def store_room(self) -> tuple[float, float]:
        """The bytes of stores that may be on their way at once to some tier, and those of the gathers among them.

        Both are infinite if a tier may lend its memory at once. A device's copies wait for the memory to be pinned.
        """
        if self._copier.takes_pageable_memory and any(tier.capabilities.lends for tier in self._tiers):
            return math.inf, math.inf
        largest_share = max(share.stores.limit_bytes for share in self._shares.values())
        return min(self._stores.budget.limit_bytes, largest_share), self._copier.gather_bytes

    def take_store_results(self) -> list[StoreResult]:
        """Return the results of stores since the last call: whether a tier has the object, as soon as that is known."""
        return self._stores.take_results()

    @property
    def has_pending_stores(self) -> bool:
        """True if some store goes on at some tier, even if its result is known."""
        return self._stores.has_pending

    def _replace_staging(self) -> None:
        """Use other staging memory in place of all that is in use, since a killed process may still write into it."""
        budgets = [self._stores.budget, *(share.stores for share in self._shares.values())]
        self._counters.add("staging_replaced_bytes", ALL_TIERS, self._staging.replace_held(budgets))

    def wait_for_arrival(self, seconds: float) -> None:
        """Wait for an arrived object, at most ``seconds``. For a step in which the engine has no other work."""
        seconds = min(seconds, self._loads.longest_wait_seconds)
        if self._processes is None:
            self._loads.wait_for_arrival(seconds)
        elif not self._loads.has_arrivals:
            self._processes.wait(seconds)

    def drain_stores(self, seconds: float) -> bool:
        """Wait for pending stores, at most ``seconds``. Returns whether all have ended."""
        if self._processes is None:
            return self._stores.drain(seconds)
        end = time.monotonic() + seconds
        while not self._stores.drain(0):
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._processes.wait(min(left, _WAIT_SECONDS))
            self._processes.receive()
        return True

    def detach(self) -> None:
        """End all that would use the KV cache, since its memory is about to go. Idempotent; never waits.

        The copier must be detached before. Loads that have not ended are cancelled; :meth:`poll` reports them. A store
        whose blocks have been copied goes on. Until :meth:`attach`, loads are cancelled at once, and stores are dropped
        and counted.
        """
        self._attached = False
        self._loads.cancel_all()

    def attach(self) -> None:
        """Use the KV cache again. The copier must be attached before."""
        self._attached = True

    def close(self) -> None:
        """Cancel all loads and drop waiting stores. Objects on their way keep their leases until their calls end.

        Copies on a device end first.
        """
        self._copier.wait()
        self._loads.close()
        self._stores.close()

    def _receive(self) -> None:
        if self._processes is not None:
            self._processes.receive()
