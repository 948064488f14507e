"""The staging pool: the only memory that I/O threads and backends ever see.

One page-aligned arena with a byte budget, touched at start (fresh memory is slow the first time). A lease is a
contiguous, page-aligned piece of it. Stores may hold only a share of the pool, its last part, so that loads always
find room in one piece; a store that finds none is dropped by the caller, never waited for (invariant I4). A lease lives
until the backend's call on it has really ended (invariant I3), which is why only its owner releases it, exactly once.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import threading
from bisect import insort

import torch

from offload_core.pinning import HostPinning
from offload_core.staging_size import ALIGNMENT_BYTES

logger = logging.getLogger(__name__)


class Lease:
    """A piece of staging memory of ``nbytes`` bytes. Release it exactly once, after the last use of its views."""

    def __init__(self, pool: StagingPool, offset: int, nbytes: int, reserved: int) -> None:
        self.nbytes = nbytes
        self._pool = pool
        self._offset = offset
        self._reserved = reserved
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
        self._pool._release(self._offset, self._reserved)

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

    def try_acquire(self, nbytes: int, *, for_store: bool) -> Lease | None:
        """Lease ``nbytes`` bytes now, or return ``None`` when the pool (or the stores' share of it) is full."""
        reserved = max(1, -(-nbytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
        with self._lock:
            found = self._last_fit(reserved) if for_store else self._first_fit(reserved)
            if found is None:
                return None
            index, offset = found
            start, size = self._free[index]
            rest = (start, offset - start) if for_store else (offset + reserved, size - reserved)
            self._free[index : index + 1] = [rest] if rest[1] else []
            self._used_bytes += reserved
        return Lease(self, offset, nbytes, reserved)

    async def acquire(self, nbytes: int) -> Lease:
        """Lease ``nbytes`` bytes for a load, waiting for room. Cancellation leaves nothing leased.

        Raises:
            ValueError: the pool could never hold so much.
        """
        if nbytes > self.capacity_bytes:
            raise ValueError(f"an object of {nbytes} bytes does not fit into {self.capacity_bytes} bytes of staging")
        room = asyncio.Event()
        waiter = (asyncio.get_running_loop(), room)
        try:
            while True:
                with self._lock:
                    self._waiters.add(waiter)
                lease = self.try_acquire(nbytes, for_store=False)
                if lease is not None:
                    return lease
                await room.wait()
                room.clear()
        finally:
            with self._lock:
                self._waiters.discard(waiter)

    def _first_fit(self, reserved: int) -> tuple[int, int] | None:
        """Return the free piece for a load (its index) and where in it the load starts."""
        return next(((index, offset) for index, (offset, size) in enumerate(self._free) if size >= reserved), None)

    def _last_fit(self, reserved: int) -> tuple[int, int] | None:
        """Return the last free piece for a store (its index) and where in it the store starts."""
        for index in reversed(range(len(self._free))):
            offset, size = self._free[index]
            if size >= reserved and offset + size - reserved >= self.capacity_bytes - self.store_limit_bytes:
                return index, offset + size - reserved
        return None

    def _release(self, offset: int, reserved: int) -> None:
        with self._lock:
            self._used_bytes -= reserved
            insort(self._free, (offset, reserved))
            index = self._free.index((offset, reserved))
            if index + 1 < len(self._free) and offset + reserved == self._free[index + 1][0]:
                self._free[index] = (offset, reserved + self._free.pop(index + 1)[1])
            if index > 0 and sum(self._free[index - 1]) == offset:
                previous = self._free[index - 1]
                self._free[index - 1] = (previous[0], previous[1] + self._free.pop(index)[1])
            for loop, room in self._waiters:  # under the lock, so that no waiter can end and its loop be closed
                loop.call_soon_threadsafe(room.set)
