"""The size of the staging pool: a worker checks it at its start, and ``offload-core plan`` beforehand."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from offload_core.objects.format import HEADER_BYTES, object_bytes

Item = TypeVar("Item")

ALIGNMENT_BYTES = 4096
"""The size of every lease is a multiple of this number of bytes."""
BATCH_OBJECTS = 8
"""Maximum number of objects in a batch."""
BATCH_BYTES = 2 * 1024 * 1024
"""Payload bytes that end a batch. Small batches let a job overlap reads, checks and copies."""
STORE_SHARE = 0.5
"""Share of the staging pool that stores may hold, from 0 to 1; the rest is the loads' part."""
SHARE_OF_SEVERAL = 0.75
"""Default of the configuration key ``staging_share`` if there are several tiers, from 0 to 1."""


class StagingUse(NamedTuple):
    """One tier's use of the staging pool."""

    share: float = 1.0
    """Share of the loads' part, and of the stores' part, that the tier may hold at once, from 0 to 1."""
    encodes: bool = False
    """True if the tier compresses or encrypts. Each of its objects then takes a second lease, for the stored bytes."""

    @property
    def leases_per_object(self) -> int:
        """Number of leases per object in a load or a store."""
        return 2 if self.encodes else 1


def in_batches(items: Iterable[Item], nbytes_of: Callable[[Item], int], times: int = 1) -> Iterator[list[Item]]:
    """Yield ``items`` in order, in batches.

    A batch ends at ``BATCH_OBJECTS`` items, or with the item that brings it to ``BATCH_BYTES`` bytes.

    Args:
        nbytes_of: returns the bytes of an item.
        times: factor of both limits.
    """
    batch: list[Item] = []
    nbytes = 0
    for item in items:
        batch.append(item)
        nbytes += nbytes_of(item)
        if len(batch) == times * BATCH_OBJECTS or nbytes >= times * BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def lease_bytes(nbytes: int) -> int:
    """Return the bytes that a lease of ``nbytes`` bytes takes from the pool."""
    return max(1, -(-nbytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES


def batch_lease_bytes(largest_payload_bytes: int) -> int:
    """Return the maximum number of bytes that a batch's leases take, with one lease per object."""
    # Every object adds its header and the rounding of its lease. The last object may exceed BATCH_BYTES as a whole.
    batch = BATCH_BYTES + object_bytes(largest_payload_bytes) + BATCH_OBJECTS * (HEADER_BYTES + ALIGNMENT_BYTES)
    return lease_bytes(batch)


def staging_uses(keys: Iterable[tuple[float | None, bool]]) -> tuple[StagingUse, ...]:
    """Return each tier's use of the pool, from its configuration key ``staging_share`` and whether it encodes."""
    given = tuple(keys)
    default = 1.0 if len(given) == 1 else SHARE_OF_SEVERAL
    return tuple(StagingUse(default if share is None else share, encodes) for share, encodes in given)


def smallest_pool_bytes(largest_payload_bytes: int, uses: Sequence[StagingUse] = (StagingUse(),)) -> int:
    """Return the size in bytes of the smallest staging pool with which no load or store can get stuck.

    The loads' part has space for one batch per tier, which no other tier can use. A hung tier's share of the stores'
    part leaves space for one object of another tier, unless that share is 1.

    Args:
        largest_payload_bytes: size of the largest payload, before compression.
        uses: one entry per tier.
    """
    batch, one = batch_lease_bytes(largest_payload_bytes), lease_bytes(object_bytes(largest_payload_bytes))
    loads = max(
        sum(batch * use.leases_per_object for use in uses),
        max(batch * use.leases_per_object / use.share for use in uses),
    )
    per_gathered = 1 + sum(use.encodes for use in uses)
    stores = max(batch * per_gathered, max(one * use.leases_per_object / use.share for use in uses))
    largest_share = max(use.share for use in uses)
    if len(uses) > 1 and largest_share < 1:
        stores = max(stores, max(one * use.leases_per_object for use in uses) / (1 - largest_share))
    whole = max(loads / (1 - STORE_SHARE), stores / STORE_SHARE)
    return lease_bytes(math.ceil(whole)) + ALIGNMENT_BYTES  # one page more, since shares are rounded down


def largest_payload_bytes(pool_bytes: int, uses: Sequence[StagingUse] = (StagingUse(),)) -> int:
    """Return the size in bytes of the largest payload for which a pool is large enough; 0 if there is none.

    Args:
        uses: one entry per tier.
    """
    sizes = range(1, pool_bytes + 1)
    return bisect_right(sizes, pool_bytes, key=lambda nbytes: smallest_pool_bytes(nbytes, uses))


def gather_limit_bytes(store_limit_bytes: int, uses: Iterable[StagingUse]) -> int:
    """Return the bytes of the stores' part that gathered objects may take together.

    Each tier that compresses or encrypts needs the same number of bytes again, for the stored form. Without this limit,
    a burst of stores would leave no bytes for them.
    """
    return store_limit_bytes // (1 + sum(use.encodes for use in uses))


def staging_problem(
    staging_bytes: int,
    largest_payload_bytes: int,
    hybrid_chunk_size: int,
    uses: Sequence[StagingUse] = (StagingUse(),),
) -> str | None:
    """Return the problem of the configuration if a pool of ``staging_bytes`` is too small, or ``None``."""
    needed = smallest_pool_bytes(largest_payload_bytes, uses)
    if staging_bytes >= needed:
        return None
    encoding = sum(use.encodes for use in uses)
    details = "" if len(uses) == 1 else f" and staging shares of {', '.join(f'{use.share:g}' for use in uses)}"
    details += f" and {encoding} backends with compression or encryption" if encoding else ""
    return (
        f"staging_bytes: {staging_bytes} is too small for this model's objects of up to {largest_payload_bytes} bytes"
        f"{details}; set it to {needed} or more, or choose a smaller hybrid_chunk_size than {hybrid_chunk_size}"
    )
