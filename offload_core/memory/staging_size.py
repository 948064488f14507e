"""How large the staging pool must be: what a worker checks at its start and ``offload-core plan`` beforehand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from offload_core.objects.format import HEADER_BYTES, object_bytes

ALIGNMENT_BYTES = 4096
"""What the size of every lease is rounded up to."""
BATCH_OBJECTS = 8
BATCH_BYTES = 2 * 1024 * 1024
"""Small, so that reading, checking and copying of a job's batches overlap."""
STORE_SHARE = 0.5
"""Part of the staging pool that stores may hold; the rest is the loads' part."""
SHARE_OF_SEVERAL = 0.75
"""What one of several tiers may hold of either part where its ``staging_share`` does not say."""


class StagingUse(NamedTuple):
    """How one tier uses the staging pool."""

    share: float = 1.0
    """Of the loads' and of the stores' part, what it may hold at once."""
    compresses: bool = False
    """Then each of its objects takes a second lease, for the bytes as they are stored."""

    @property
    def leases_per_object(self) -> int:
        """Leases that an object takes on its way."""
        return 2 if self.compresses else 1


def lease_bytes(nbytes: int) -> int:
    """Return what a lease of ``nbytes`` bytes takes of the pool."""
    return max(1, -(-nbytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES


def batch_lease_bytes(largest_payload_bytes: int) -> int:
    """Return what the leases of one batch take at most, one per object."""
    # An object reaches beyond the batch's last payload byte by its header, and by what its lease is rounded up.
    batch = BATCH_BYTES + object_bytes(largest_payload_bytes) + BATCH_OBJECTS * (HEADER_BYTES + ALIGNMENT_BYTES)
    return lease_bytes(batch)


def staging_uses(keys: Iterable[tuple[float | None, bool]]) -> tuple[StagingUse, ...]:
    """Return each tier's use of the pool, from its key ``staging_share`` and whether it compresses."""
    given = tuple(keys)
    default = 1.0 if len(given) == 1 else SHARE_OF_SEVERAL
    return tuple(StagingUse(default if share is None else share, compresses) for share, compresses in given)


def smallest_pool_bytes(largest_payload_bytes: int, uses: Sequence[StagingUse] = (StagingUse(),)) -> int:
    """Return the smallest staging pool with which all loads and stores of objects up to this size can go on.

    The loads' part has a batch that is each tier's alone; what a hung tier may hold of the stores' part leaves room for
    an object of the others, unless its share is 1.

    Args:
        largest_payload_bytes: of an object, before compression.
        uses: each tier's.
    """
    batch, one = batch_lease_bytes(largest_payload_bytes), lease_bytes(object_bytes(largest_payload_bytes))
    loads = max(
        sum(batch * use.leases_per_object for use in uses),
        max(batch * use.leases_per_object / use.share for use in uses),
    )
    per_gathered = 1 + sum(use.compresses for use in uses)
    stores = max(batch * per_gathered, max(one * use.leases_per_object / use.share for use in uses))
    largest_share = max(use.share for use in uses)
    if len(uses) > 1 and largest_share < 1:
        stores = max(stores, max(one * use.leases_per_object for use in uses) / (1 - largest_share))
    whole = max(loads / (1 - STORE_SHARE), stores / STORE_SHARE)
    return lease_bytes(math.ceil(whole)) + ALIGNMENT_BYTES  # a page, since shares are rounded down


def gather_limit_bytes(store_limit_bytes: int, uses: Iterable[StagingUse]) -> int:
    """Return what may be gathered for stores at once, of the stores' part.

    Each tier that compresses takes as much again for what is gathered; else bursts would leave it nothing.
    """
    return store_limit_bytes // (1 + sum(use.compresses for use in uses))


def staging_problem(
    staging_bytes: int,
    largest_payload_bytes: int,
    hybrid_chunk_size: int,
    uses: Sequence[StagingUse] = (StagingUse(),),
) -> str | None:
    """Return why a pool of ``staging_bytes`` does not do, as a problem of the configuration, or ``None``."""
    needed = smallest_pool_bytes(largest_payload_bytes, uses)
    if staging_bytes >= needed:
        return None
    compressing = sum(use.compresses for use in uses)
    details = "" if len(uses) == 1 else f" and staging shares of {', '.join(f'{use.share:g}' for use in uses)}"
    details += f" and {compressing} backends with compression" if compressing else ""
    return (
        f"staging_bytes: {staging_bytes} is too small for this model's objects of up to {largest_payload_bytes} bytes"
        f"{details}; set it to {needed} or more, or choose a smaller hybrid_chunk_size than {hybrid_chunk_size}"
    )
