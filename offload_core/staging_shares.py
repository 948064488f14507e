"""How the staging pool is shared out among the tiers, so that one that hangs leaves the others their room (I4)."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from offload_core.staging import LoadShare, StagingPool
from offload_core.staging_size import ALIGNMENT_BYTES, batch_lease_bytes, lease_bytes


class TierShare:
    """What one tier may hold of the staging pool. Thread-safe.

    Args:
        loads: of the loads' part; the pool keeps the account.
        store_limit_bytes: of the stores' part. Several tiers hold a store's lease at once, each while its own call
            lasts, and each is charged for it.
    """

    def __init__(self, loads: LoadShare, store_limit_bytes: int) -> None:
        self.loads = loads
        self.store_limit_bytes = store_limit_bytes
        self._lock = threading.Lock()
        self._store_bytes = 0

    @property
    def store_bytes(self) -> int:
        """What the tier is charged for its stores at the moment."""
        return self._store_bytes

    def try_charge_store(self, nbytes: int) -> bool:
        """Charge the tier for a store's lease of ``nbytes`` bytes; ``False``, and nothing charged, at its limit."""
        with self._lock:
            if self._store_bytes + lease_bytes(nbytes) > self.store_limit_bytes:
                return False
            self._store_bytes += lease_bytes(nbytes)
            return True

    def end_store(self, nbytes: int) -> None:
        """End what :meth:`try_charge_store` has charged; the tier's call has ended."""
        with self._lock:
            self._store_bytes -= lease_bytes(nbytes)


def share_out(pool: StagingPool, shares: Mapping[str, float], largest_payload_bytes: int) -> dict[str, TierShare]:
    """Share a pool that nobody holds anything of yet out among tiers.

    Args:
        shares: per tier's name, the part of the loads' and of the stores' part that it may hold at once.
        largest_payload_bytes: of all objects; where there are several tiers, the loads of each have a piece of the
            pool of their own, in which a batch of these finds room whatever the other tiers hold.
    """
    load_part_bytes = pool.capacity_bytes - pool.store_limit_bytes
    own_bytes = 0
    if len(shares) > 1:  # smaller than a batch only in pools that staging_size refuses
        own_bytes = min(batch_lease_bytes(largest_payload_bytes), load_part_bytes // len(shares))
        own_bytes -= own_bytes % ALIGNMENT_BYTES
    return {
        name: TierShare(
            pool.add_load_share(int(load_part_bytes * share), own_bytes), int(pool.store_limit_bytes * share)
        )
        for name, share in shares.items()
    }
