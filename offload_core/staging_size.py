"""How large the staging pool must be: what a worker checks at its start and ``offload-core plan`` beforehand."""

from __future__ import annotations

from offload_core.object_format import HEADER_BYTES, object_bytes

ALIGNMENT_BYTES = 4096
"""What the size of every lease is rounded up to."""
BATCH_OBJECTS = 8
BATCH_BYTES = 2 * 1024 * 1024
"""Small, so that reading, checking and copying of a job's batches overlap."""
STORE_SHARE = 0.5
"""Part of the staging pool that stores may hold."""


def smallest_pool_bytes(largest_payload_bytes: int, compressing_tiers: int = 0) -> int:
    """Return the smallest staging pool with which every load and store of objects up to this size can go on.

    Args:
        largest_payload_bytes: of an object, before compression.
        compressing_tiers: each takes a batch's memory a second time to compress it; a load, to decompress it.
    """
    # An object reaches beyond the batch's last payload byte by its header, and by what its lease is rounded up.
    batch = BATCH_BYTES + object_bytes(largest_payload_bytes) + BATCH_OBJECTS * (HEADER_BYTES + ALIGNMENT_BYTES)
    return int((1 + compressing_tiers) * batch / min(STORE_SHARE, 1 - STORE_SHARE))


def staging_problem(
    staging_bytes: int, largest_payload_bytes: int, hybrid_chunk_size: int, compressing_tiers: int = 0
) -> str | None:
    """Return why a pool of ``staging_bytes`` does not do, as a problem of the configuration, or ``None``."""
    needed = smallest_pool_bytes(largest_payload_bytes, compressing_tiers)
    if staging_bytes >= needed:
        return None
    return (
        f"staging_bytes: {staging_bytes} is too small for this model's objects of up to {largest_payload_bytes} bytes"
        + (f" and {compressing_tiers} backends with compression; " if compressing_tiers else "; ")
        + f"set it to {needed} or more, or choose a smaller hybrid_chunk_size than {hybrid_chunk_size}"
    )
