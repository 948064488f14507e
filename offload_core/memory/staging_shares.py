"""How the staging pool is shared out among the tiers, so that one that hangs leaves the others their room (I4)."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from offload_core.memory.staging_pool import Lease, LoadShare, StagingPool
from offload_core.memory.staging_size import ALIGNMENT_BYTES, StagingUse, batch_lease_bytes, lease_bytes


class TierShare:
    """What one tier may hold of the staging pool. Thread-safe.

    Args:
        pool: the staging pool.
        loads: of the loads' part; the pool keeps the account.
        store_limit_bytes: of the stores' part. Several tiers hold a store's lease at once, each while its own call
            lasts, and each is charged for it.
        leases_per_object: what a store is charged for; a tier that compresses takes a second lease for that.
    """

    def __init__(self, pool: StagingPool, loads: LoadShare, store_limit_bytes: int, leases_per_object: int) -> None:
        self._pool = pool
        self.loads = loads
        self.store_limit_bytes = store_limit_bytes
        self._leases_per_object = leases_per_object
        self._lock = threading.Lock()
        self._store_bytes = 0

    @property
    def store_bytes(self) -> int:
        """What the tier is charged for its stores at the moment."""
        return self._store_bytes

    def store_charge_bytes(self, nbytes: int) -> int:
        """Return what a store with a lease of ``nbytes`` bytes is charged for."""
        return self._leases_per_object * lease_bytes(nbytes)

    def store_shortfall_bytes(self, nbytes: int) -> int:
        """Return how much less the tier must be charged for before :meth:`try_charge_store` can succeed; 0 or more."""
        return max(0, self._store_bytes + self.store_charge_bytes(nbytes) - self.store_limit_bytes)

    def try_charge_store(self, nbytes: int) -> bool:
        """Charge the tier for a store's leases of ``nbytes`` bytes; ``False``, and nothing charged, at its limit."""
        charged = self.store_charge_bytes(nbytes)
        with self._lock:
            if self._store_bytes + charged > self.store_limit_bytes:
                return False
            self._store_bytes += charged
            return True

    def discharge_store(self, nbytes: int) -> None:
        """End what :meth:`try_charge_store` has charged; the tier's call has ended."""
        with self._lock:
            self._store_bytes -= self.store_charge_bytes(nbytes)

    def try_scratch_for_store(self, nbytes: int) -> Lease | None:
        """Lease ``nbytes`` bytes beside a store's own lease, for which it is charged; ``None``: there is no room."""
        return self._pool.try_acquire(nbytes, for_store=True)

    def try_scratch_for_load(self, nbytes: int) -> Lease | None:
        """Lease ``nbytes`` bytes beside a load's own lease, within the share; ``None`` where there is no room now."""
        leases = self._pool.try_acquire_all([nbytes], self.loads)
        return None if leases is None else leases[0]


def share_out(pool: StagingPool, uses: Mapping[str, StagingUse], largest_payload_bytes: int) -> dict[str, TierShare]:
    """Share a pool that nobody holds anything of yet out among tiers.

    Args:
        uses: per tier's name, how it uses the pool.
        largest_payload_bytes: of all objects; where there are several tiers, the loads of each have a piece of the
            pool of their own, in which a batch of these finds room whatever the other tiers hold.
    """
    load_part_bytes = pool.capacity_bytes - pool.store_limit_bytes
    tiers = {}
    for name, use in uses.items():
        own_bytes = 0
        if len(uses) > 1:  # smaller than a batch only in pools that staging_size refuses
            own_bytes = batch_lease_bytes(largest_payload_bytes) * use.leases_per_object
            own_bytes = min(own_bytes, load_part_bytes // len(uses) // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
        loads = pool.add_load_share(int(load_part_bytes * use.share), own_bytes)
        tiers[name] = TierShare(pool, loads, int(pool.store_limit_bytes * use.share), use.leases_per_object)
    return tiers
