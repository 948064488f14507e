"""How large the staging pool must be: what a worker checks at its start and ``offload-core plan`` beforehand."""

from __future__ import annotations

import math
from collections.abc import Sequence

from offload_core.object_format import HEADER_BYTES, object_bytes

ALIGNMENT_BYTES = 4096
"""What the size of every lease is rounded up to."""
BATCH_OBJECTS = 8
BATCH_BYTES = 2 * 1024 * 1024
"""Small, so that reading, checking and copying of a job's batches overlap."""
STORE_SHARE = 0.5
"""Part of the staging pool that stores may hold; the rest is the loads' part."""
SHARE_OF_MANY = 0.75
"""What one of several tiers may hold of either part where its ``staging_share`` does not say."""


def lease_bytes(nbytes: int) -> int:
    """Return what a lease of ``nbytes`` bytes takes of the pool."""
    return max(1, -(-nbytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES


def batch_lease_bytes(largest_payload_bytes: int) -> int:
    """Return what the leases of one batch take at most."""
    # An object reaches beyond the batch's last payload byte by its header, and by what its lease is rounded up.
    batch = BATCH_BYTES + object_bytes(largest_payload_bytes) + BATCH_OBJECTS * (HEADER_BYTES + ALIGNMENT_BYTES)
    return lease_bytes(batch)


def tier_shares(given: Sequence[float | None]) -> tuple[float, ...]:
    """Return each tier's share of the loads' and of the stores' part, from what their ``staging_share`` keys say."""
    default = 1.0 if len(given) == 1 else SHARE_OF_MANY
    return tuple(default if share is None else share for share in given)


def smallest_pool_bytes(largest_payload_bytes: int, shares: Sequence[float] = (1.0,)) -> int:
    """Return the smallest staging pool with which all loads and stores of objects up to this size can go on.

    The loads' part has a batch that is each tier's alone; what a hung tier may hold of the stores' part leaves room for
    an object of the others, unless its share is 1.

    Args:
        shares: each tier's.
    """
    batch, one = batch_lease_bytes(largest_payload_bytes), lease_bytes(object_bytes(largest_payload_bytes))
    loads = max(batch * len(shares), batch / min(shares))
    stores = max(batch, one / min(shares))
    if len(shares) > 1 and max(shares) < 1:
        stores = max(stores, one / (1 - max(shares)))
    whole = max(loads / (1 - STORE_SHARE), stores / STORE_SHARE)
    return lease_bytes(math.ceil(whole)) + ALIGNMENT_BYTES  # a page, since shares are rounded down


def staging_problem(
    staging_bytes: int, largest_payload_bytes: int, hybrid_chunk_size: int, shares: Sequence[float] = (1.0,)
) -> str | None:
    """Return why a pool of ``staging_bytes`` does not do, as a problem of the configuration, or ``None``."""
    needed = smallest_pool_bytes(largest_payload_bytes, shares)
    if staging_bytes >= needed:
        return None
    tiers = "" if len(shares) == 1 else f" and staging shares of {', '.join(f'{share:g}' for share in shares)}"
    return (
        f"staging_bytes: {staging_bytes} is too small for this model's objects of up to {largest_payload_bytes} bytes"
        f"{tiers}; set it to {needed} or more, or choose a smaller hybrid_chunk_size than {hybrid_chunk_size}"
    )
