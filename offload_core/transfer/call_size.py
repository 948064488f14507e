"""The size of a tier's calls, in batches.

On a remote medium each call costs round trips, so that one call takes several batches. In host memory and on a local
disk a call takes one batch: small calls let reads, checks and copies overlap.
"""

from __future__ import annotations

from offload_core.memory.staging_size import BATCH_BYTES
from offload_core.tiers.tier import Tier

CALL_BYTES = 16 * 1024 * 1024
"""Payload bytes that a large call may have."""
SHARE_OF_CALLS = 0.5
"""Part of a tier's share of the staging memory that all its calls together may hold, if they are large, from 0 to 1."""
QUICK_SECONDS = 0.25
"""Limit for the duration of a large call. Slower tiers get smaller calls, which lose less at a deadline."""


def max_batches(share_bytes: int, calls: int, largest_payload_bytes: int) -> int:
    """Return the maximum number of batches in a large call; 1 if there is little staging memory.

    Args:
        share_bytes: size of the tier's share of the staging memory.
        calls: number of calls that may hold memory of this share at once.
        largest_payload_bytes: size of the largest payload of all packs.
    """
    call_bytes = min(CALL_BYTES, int(share_bytes * SHARE_OF_CALLS) // calls)
    return max(1, call_bytes // max(BATCH_BYTES, largest_payload_bytes))


def max_batches_of(tier: Tier, share_bytes: int, calls: int, largest_payload_bytes: int) -> int:
    """Return the maximum number of batches in a call on ``tier``; see :func:`max_batches` for the other arguments."""
    if tier.capabilities.medium != "remote":
        return 1
    return max_batches(share_bytes // (1 + tier.compresses), calls, largest_payload_bytes)


class CallSize:
    """The number of batches in a tier's next call. For one thread.

    It starts with one batch. Quick calls double it and slow calls halve it, so that a slow medium gets calls as small
    as those on a disk.

    Args:
        most: its upper limit.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.batches = 1
        """The maximum number of batches in the next call."""

    def ended(self, batches: int, seconds: float, *, worked: bool) -> None:
        """Note the end of a call.

        Args:
            batches: number of batches in the call.
            seconds: duration of the call.
            worked: whether the call moved any object. A call that failed at once says nothing about the speed.
        """
        if seconds > QUICK_SECONDS:
            self.batches = max(1, min(self.batches, batches) // 2)
        elif worked and seconds <= QUICK_SECONDS / 2 and batches == self.batches:
            self.batches = min(self._most, 2 * self.batches)
