"""The size of a tier's calls, in batches.

If the tier is in another process, a call is a message. Each message wakes four threads, so that one message takes many
batches. Several threads of that process work on them, or a process of the backend.

In the engine's process, a call in host memory and on a local disk takes one batch: small calls let reads, checks and
copies overlap. On a remote medium each call costs round trips, so that it takes several batches there too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from offload_core.memory.staging_size import BATCH_BYTES, BATCH_OBJECTS
from offload_core.objects.format import HEADER_BYTES
from offload_core.tiers.calls.division import divides_calls, threads_of_call
from offload_core.tiers.tier import Tier

CALL_BATCHES = 8
"""Maximum number of batches in a large call."""
CALL_BYTES = CALL_BATCHES * (BATCH_BYTES + BATCH_OBJECTS * HEADER_BYTES)
"""Maximum number of bytes in a large call of so many batches, with headers. A call of one batch may have more."""
LOAD_MESSAGE_BATCHES = 32
"""Maximum number of batches in a load from a tier in another process."""
STORE_MESSAGE_BATCHES = 16
"""Maximum number of batches in a store on a tier in another process. Each waits for the copies of all its objects."""
SHARE_OF_CALLS = 0.5
"""Part of a tier's share of the staging memory that all its large calls together may hold, from 0 to 1.

The rest is for stores that wait, and for compressed bytes. Loads by messages need neither, so they get all of it.
"""
QUICK_SECONDS = 0.25
"""Limit for the duration of a large call. Slower tiers get smaller calls, which lose less at a deadline."""


def max_call_bytes(bytes_of_calls: int, calls: int, leases_per_object: int = 1, batches: int = CALL_BATCHES) -> int:
    """Return the maximum number of bytes that the leases of a call of several batches take.

    Args:
        bytes_of_calls: bytes that all calls together may hold.
        calls: number of calls that may hold memory at once.
        leases_per_object: 2 for a tier that encodes, else 1.
        batches: maximum number of batches in a call.
    """
    largest = leases_per_object * batches * (CALL_BYTES // CALL_BATCHES)
    return min(largest, bytes_of_calls // calls)


def load_slots_of(tier: Tier) -> int:
    """Return how many slots there are for loads of ``tier`` within their deadlines. See :func:`slots_of_call`.

    They are twice the threads, so that threads go on reading while other batches are handed over. If the tier is in
    another process, a message has work for several threads, and half as many messages may be larger.
    """
    threads = tier.config.io_threads
    return max(2, threads) if tier.is_elsewhere else 2 * threads


def store_slots_of(tier: Tier) -> int:
    """Return how many slots there are for stores on ``tier`` within their deadlines. See :func:`slots_of_call`.

    One more than threads keeps the threads busy. Further calls would only delay loads.
    """
    return tier.config.io_threads + 1


def slots_of_call(tier: Tier, batches: int) -> int:
    """Return how many slots a call of so many batches takes: one per thread that may work on it.

    Overdue calls may leave as many slots to others as the tier has threads, since so many threads can be replaced.
    """
    if tier.is_elsewhere and divides_calls(tier.capabilities, encodes=tier.encodes):
        return min(batches, threads_of_call(tier.config.io_threads))
    return 1


def large_calls_in(tier: Tier, slots: int) -> int:
    """Return how many large calls of ``tier`` run at once, if the last one may take more slots than are left."""
    return -(-slots // slots_of_call(tier, STORE_MESSAGE_BATCHES))


def load_size_of(tier: Tier, share_bytes: int) -> CallSize:
    """Return the size of loads from ``tier``.

    Args:
        share_bytes: size of the share of the staging memory for these loads.
    """
    nbytes = int(share_bytes * (1 if tier.is_elsewhere else SHARE_OF_CALLS))
    return _call_size(tier, nbytes, load_slots_of(tier), LOAD_MESSAGE_BATCHES)


def store_size_of(tier: Tier, share_bytes: int) -> CallSize:
    """Return the size of stores on ``tier``.

    Args:
        share_bytes: size of the share of the staging memory for these stores.
    """
    return _call_size(tier, int(share_bytes * SHARE_OF_CALLS), store_slots_of(tier), STORE_MESSAGE_BATCHES)


def _call_size(tier: Tier, bytes_of_calls: int, slots: int, batches_of_message: int) -> CallSize:
    most = batches_of_message if tier.is_elsewhere else CALL_BATCHES if tier.capabilities.medium == "remote" else 1
    slots += tier.config.io_threads  # those of overdue calls
    slots += slots_of_call(tier, most) - 1  # the last call may take more than are left
    of_calls = (bytes_of_calls * slots_of_call(tier, batches) for batches in range(1, most + 1))
    return CallSize(most, [max_call_bytes(nbytes, slots, 1 + tier.encodes, most) for nbytes in of_calls])


class CallSize:
    """The number of batches in a tier's next call. For one thread.

    It starts with one batch. Quick calls double it and slow calls halve it, so that a slow medium gets calls as small
    as those on a disk. After a call that failed it is one batch again, since an error fails all objects of its call.

    Args:
        most: its upper limit.
        max_bytes: maximum number of bytes that the leases of a call take, for one batch, two, and so on up to ``most``.
            A single batch may take more.
    """

    def __init__(self, most: int, max_bytes: Sequence[int]) -> None:
        self._most = most
        self._max_bytes = max_bytes
        self.batches = 1
        """The maximum number of batches in the next call."""

    def take(self, sizes: Iterable[int], most: int) -> int:
        """Return how many of the waiting batches the next call takes: at least one, if there is one.

        Args:
            sizes: bytes that the leases of each waiting batch take, in order.
            most: upper limit, for example to leave batches for other calls.
        """
        count = total = 0
        for nbytes in sizes:
            total += nbytes
            if count and (count >= min(most, self.batches) or total > self._max_bytes[count]):
                break
            count += 1
        return count

    def ended(self, batches: int, seconds: float, *, worked: bool, failed: bool = False) -> None:
        """Note the end of a call.

        Args:
            batches: number of batches in the call.
            seconds: duration of the call.
            worked: whether the call moved any object. One that found nothing says nothing about the speed.
            failed: whether it ended in an error, or a store stored nothing.
        """
        if failed:
            self.batches = 1
        elif seconds > QUICK_SECONDS:
            self.batches = max(1, min(self.batches, batches) // 2)
        elif worked and seconds <= QUICK_SECONDS / 2 and batches == self.batches:
            self.batches = min(self._most, 2 * self.batches)
