"""The staging pool: the only memory that I/O threads and backends ever see.

One page-aligned arena with a byte budget, touched at start (fresh memory is slow the first time). A lease is a
contiguous, page-aligned piece of it. Stores may hold only a share of the pool, its last part, so that loads always
find room in one piece; a store that finds none is dropped by the caller, never waited for (invariant I4). Each tier's
loads have a limit, and where there are several tiers a piece of the arena that no other tier's may use, so that what
hangs in one never stops another. A lease lives until the backend's call on it has really ended (invariant I3), which is
why only its owner releases it, exactly once.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import threading
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offload_core.api.pinned_memory import HostPinning
from offload_core.memory.staging_size import ALIGNMENT_BYTES, lease_bytes

logger = logging.getLogger(__name__)


@dataclass
class LoadShare:
    """What the loads of one tier may hold of a pool, and hold: :meth:`StagingPool.add_load_share` makes it."""

    limit_bytes: int
    private_start: int
    private_stop: int
    """A piece of the arena that only these loads use; it may be empty."""
    held_bytes: int = 0
    """Changed under the pool's lock."""


class Lease:
    """A piece of staging memory of ``nbytes`` bytes. Release it exactly once, after the last use of its views."""

    def __init__(self, pool: StagingPool, offset: int, nbytes: int, share: LoadShare | None) -> None:
        self.nbytes = nbytes
        self._pool = pool
        self._offset = offset
        self._reserved = lease_bytes(nbytes)
        self._share = share
        """Whose load holds it; ``None`` for a store."""
        self._released = False

    @property
    def view(self) -> memoryview:
        """Writable bytes of the lease."""
        self._check_held()
        return self._pool.memory[self._offset : self._offset + self.nbytes]

    @property
    def tensor(self) -> torch.Tensor:
        """The same bytes as an int8 tensor of shape ``(nbytes,)``."""
        self._check_held()
        return self._pool.tensor[self._offset : self._offset + self.nbytes]

    def release(self) -> None:
        """Give the memory back.

        Raises:
            RuntimeError: the lease was released before; the memory may belong to another lease now.
        """
        self._check_held()
        self._released = True
        self._pool._release(self)

    def _check_held(self) -> None:
        if self._released:
            raise RuntimeError(f"staging lease of {self.nbytes} bytes at {self._offset} is used after its release")


class StagingPool:
    """A byte budget of staging memory.

    Thread-safe. First fit over a sorted free list: leases are few (one per object in flight) and short-lived. Loads
    fill the arena from its start and stores their part of it from its end, so that stores which hang cannot split what
    is left to loads.

    Args:
        capacity_bytes: rounded down to a multiple of 4096.
        store_share: the part of the capacity, at the arena's end, that stores may hold, between 0 and 1.
        pinning: how to pin the memory, where a GPU copies to and from it; what cannot be pinned is used as it is.
    """

    def __init__(self, capacity_bytes: int, store_share: float, pinning: HostPinning | None = None) -> None:
        self.capacity_bytes = capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        if self.capacity_bytes <= 0:
            raise ValueError(f"staging capacity is {capacity_bytes} bytes; it must be at least {ALIGNMENT_BYTES}")
        self.store_limit_bytes = int(self.capacity_bytes * store_share)
        arena = mmap.mmap(-1, self.capacity_bytes)
        self.memory = memoryview(arena)
        self.tensor = torch.frombuffer(arena, dtype=torch.int8)
        self.tensor.zero_()
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, self.capacity_bytes)]
        self._used_bytes = 0
        self._store_bytes = 0
        self._shared_start = 0  # where the pieces end that belong to one tier's loads each
        self._waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._pinning = pinning
        if pinning is not None:
            try:
                pinning.register(self.tensor.data_ptr(), self.capacity_bytes)
            except OSError as error:
                self._pinning = None
                logger.warning("staging memory is not pinned, which makes a GPU's copies slower: %s", error)

    def close(self) -> None:
        """Unpin the memory, which stays usable. Harmless when repeated; nothing may be copying to or from a GPU."""
        pinning, self._pinning = self._pinning, None
        if pinning is not None:
            try:
                pinning.unregister(self.tensor.data_ptr())
            except OSError as error:
                logger.warning("staging memory stays pinned until the process ends: %s", error)

    @property
    def used_bytes(self) -> int:
        """Bytes leased at the moment, rounding to 4096 included."""
        return self._used_bytes

    @property
    def store_bytes(self) -> int:
        """Those of them that stores hold."""
        return self._store_bytes

    def add_load_share(self, limit_bytes: int, own_bytes: int) -> LoadShare:
        """Set ``own_bytes`` of the arena, a multiple of 4096, aside for the loads of one tier, before any lease.

        Args:
            limit_bytes: what these loads may hold at once, in that piece or anywhere that is nobody's own.
        """
        start, self._shared_start = self._shared_start, self._shared_start + own_bytes
        return LoadShare(limit_bytes, start, self._shared_start)

    def try_acquire(self, nbytes: int, *, for_store: bool) -> Lease | None:
        """Lease ``nbytes`` bytes now, or return ``None`` when the pool (or the stores' share of it) is full."""
        with self._lock:
            return self._take_for_store(nbytes) if for_store else self._take_for_load(nbytes, self._anyones())

    def try_acquire_all(self, sizes: Sequence[int], share: LoadShare | None = None) -> list[Lease] | None:
        """Lease a piece of each size now for a load within ``share``; ``None``, and nothing leased, if one has no room.

        A batch that held some of its leases while it waits for the others could wait for a piece between them for ever.
        """
        share = share or self._anyones()
        leases: list[Lease] = []
        with self._lock:
            if share.held_bytes + sum(map(lease_bytes, sizes)) > share.limit_bytes:
                return None
            for nbytes in sizes:
                lease = self._take_for_load(nbytes, share)
                if lease is None:
                    for taken in leases:
                        taken._released = True
                        self._give_back(taken)
                    return None
                leases.append(lease)
        return leases

    async def acquire_all(self, sizes: Sequence[int], share: LoadShare | None = None) -> list[Lease]:
        """Lease a piece of each size for a load, waiting for room for all. Cancellation leaves nothing leased.

        Whoever waits here holds nothing of the pool meanwhile. Where one call at a time waits per share, and all leases
        that this share's loads hold come back in the end, it gets its leases: then its own piece is free as a whole.

        Raises:
            ValueError: the pool or the share could never hold so much.
        """
        limit = self.capacity_bytes if share is None else min(share.limit_bytes, self.capacity_bytes)
        if (nbytes := sum(map(lease_bytes, sizes))) > limit:
            raise ValueError(f"objects of {nbytes} bytes do not fit into {limit} bytes of staging")
        room = asyncio.Event()
        waiter = (asyncio.get_running_loop(), room)
        try:
            while True:
                with self._lock:
                    self._waiters.add(waiter)
                leases = self.try_acquire_all(sizes, share)
                if leases is not None:
                    return leases
                await room.wait()
                room.clear()
        finally:
            with self._lock:
                self._waiters.discard(waiter)

    def convert_to_store(self, lease: Lease) -> bool:
        """Count a load's lease as a store's from now on; returns whether the stores' share has room for it.

        A lease in a piece that belongs to one tier's loads stays a load's: a store that hangs must not take that away.
        """
        lease._check_held()
        with self._lock:
            share = lease._share
            if share is None or lease._offset < self._shared_start:
                return False
            if self._store_bytes + lease._reserved > self.store_limit_bytes:
                return False
            share.held_bytes -= lease._reserved
            lease._share = None
            self._store_bytes += lease._reserved
            self._wake()
        return True

    def _anyones(self) -> LoadShare:
        """Return a share without limit or a piece of its own."""
        return LoadShare(self.capacity_bytes, 0, 0)

    def _take_for_load(self, nbytes: int, share: LoadShare) -> Lease | None:
        """Take the first piece that fits where every tier may; else of the share's own."""
        reserved = lease_bytes(nbytes)
        for start, stop in ((self._shared_start, self.capacity_bytes), (share.private_start, share.private_stop)):
            for index, (offset, size) in enumerate(self._free):
                first = max(offset, start)
                if min(offset + size, stop) - first >= reserved:
                    share.held_bytes += reserved
                    return self._take(index, first, Lease(self, first, nbytes, share))
        return None

    def _take_for_store(self, nbytes: int) -> Lease | None:
        """Take the end of the last piece that fits, of the stores' part."""
        reserved = lease_bytes(nbytes)
        if self._store_bytes + reserved > self.store_limit_bytes:  # what is kept of loads lies anywhere
            return None
        for index in reversed(range(len(self._free))):
            offset, size = self._free[index]
            first = offset + size - reserved
            if size >= reserved and first >= self.capacity_bytes - self.store_limit_bytes:
                self._store_bytes += reserved
                return self._take(index, first, Lease(self, first, nbytes, None))
        return None

    def _take(self, index: int, first: int, lease: Lease) -> Lease:
        """Cut ``lease``, which starts at ``first``, out of a free piece."""
        offset, size = self._free[index]
        rests = ((offset, first - offset), (first + lease._reserved, offset + size - first - lease._reserved))
        self._free[index : index + 1] = [rest for rest in rests if rest[1]]
        self._used_bytes += lease._reserved
        return lease

    def _release(self, lease: Lease) -> None:
        with self._lock:
            self._give_back(lease)
            self._wake()

    def _give_back(self, lease: Lease) -> None:
        offset, reserved = lease._offset, lease._reserved
        self._used_bytes -= reserved
        if lease._share is None:
            self._store_bytes -= reserved
        else:
            lease._share.held_bytes -= reserved
        insort(self._free, (offset, reserved))
        index = self._free.index((offset, reserved))
        if index + 1 < len(self._free) and offset + reserved == self._free[index + 1][0]:
            self._free[index] = (offset, reserved + self._free.pop(index + 1)[1])
        if index > 0 and sum(self._free[index - 1]) == offset:
            previous = self._free[index - 1]
            self._free[index - 1] = (previous[0], previous[1] + self._free.pop(index)[1])

    def _wake(self) -> None:
        for loop, room in self._waiters:  # under the lock, so that no waiter can end and its loop be closed
            loop.call_soon_threadsafe(room.set)
