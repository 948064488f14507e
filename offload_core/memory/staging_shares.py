"""The tiers' shares of the staging pool, so that a hung tier leaves the others enough memory (invariant I4)."""

from __future__ import annotations

from collections.abc import Mapping

from offload_core.memory.byte_budget import ByteBudget
from offload_core.memory.staging_pool import Lease, LoadShare, StagingPool
from offload_core.memory.staging_size import ALIGNMENT_BYTES, StagingUse, batch_lease_bytes, lease_bytes


class TierShare:
    """One tier's share of the staging pool. Thread-safe.

    Args:
        pool: the staging pool.
        loads: the share of the loads' part; the pool counts its bytes.
        store_limit_bytes: the share of the stores' part.
        leases_per_object: number of leases that a store is charged for: 2 for a tier that encodes, else 1.
    """

    def __init__(self, pool: StagingPool, loads: LoadShare, store_limit_bytes: int, leases_per_object: int) -> None:
        self._pool = pool
        self.loads = loads
        self.stores = ByteBudget(store_limit_bytes)
        """The bytes that the tier is charged for. Several tiers may hold a store's lease at once, each during its own
        call, and each of them is charged for it."""
        self._leases_per_object = leases_per_object

    def store_charge_bytes(self, nbytes: int) -> int:
        """Return the charge, in bytes, for a store with a lease of ``nbytes`` bytes."""
        return self._leases_per_object * lease_bytes(nbytes)

    def store_shortfall_bytes(self, nbytes: int) -> int:
        """Return the bytes that stores must free before :meth:`try_charge_store` can succeed; 0 or more."""
        return max(0, self.stores.held_bytes + self.store_charge_bytes(nbytes) - self.stores.limit_bytes)

    def try_charge_store(self, nbytes: int) -> bool:
        """Charge the tier for a store with a lease of ``nbytes`` bytes; return ``False``, uncharged, at its limit."""
        return self.stores.try_take(self.store_charge_bytes(nbytes))

    def discharge_store(self, nbytes: int) -> None:
        """Undo :meth:`try_charge_store`, after the end of the tier's call."""
        self.stores.give_back(self.store_charge_bytes(nbytes))

    def try_scratch_for_store(self, nbytes: int) -> Lease | None:
        """Lease ``nbytes`` more bytes for a store that is charged for them; ``None`` if the pool is full."""
        return self._pool.try_acquire(nbytes, for_store=True)

    def try_scratch_for_load(self, nbytes: int) -> Lease | None:
        """Lease ``nbytes`` more bytes for a load, within the share; ``None`` if the share or the pool is full."""
        leases = self._pool.try_acquire_all([nbytes], self.loads)
        return None if leases is None else leases[0]


def share_out(pool: StagingPool, uses: Mapping[str, StagingUse], largest_payload_bytes: int) -> dict[str, TierShare]:
    """Divide a pool without any leases among tiers.

    With several tiers, the loads of each tier have a private piece of the pool. A batch of the largest objects always
    fits into it.

    Args:
        uses: per tier name, its use of the pool.
        largest_payload_bytes: size of the largest payload of all packs.

    Returns:
        Per tier name, its share.
    """
    load_part_bytes = pool.capacity_bytes - pool.store_limit_bytes
    tiers = {}
    for name, use in uses.items():
        private_bytes = 0
        if len(uses) > 1:  # staging_size refuses pools in which this is smaller than a batch
            private_bytes = batch_lease_bytes(largest_payload_bytes) * use.leases_per_object
            private_bytes = min(private_bytes, load_part_bytes // len(uses) // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
        loads = pool.add_load_share(int(load_part_bytes * use.share), private_bytes)
        tiers[name] = TierShare(pool, loads, int(pool.store_limit_bytes * use.share), use.leases_per_object)
    return tiers
