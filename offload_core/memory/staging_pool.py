"""The staging pool: the only memory that I/O threads and backends ever see.

It is one page-aligned arena with a byte budget, written once at start, since the first use of fresh memory is slow. A
lease is a contiguous, page-aligned piece of it. Stores may hold only the last part of the pool, so that the loads' part
stays in one piece. If that part is full, the caller drops the store and never waits (invariant I4).

Each tier's loads have a limit. With several tiers, each tier's loads also have a private piece of the arena, so that a
hung tier never stops another. A lease lives until the backend's call on it has really ended (invariant I3). So only the
lease's owner releases it, exactly once.

A killed process may outlive its SIGKILL for hours, in a system call on a dead medium, and so do its leases. Then a
reserve behind the arena takes their place until the process is gone.
"""

from __future__ import annotations

import logging
import mmap
import threading
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offload_core.api.memory.pinned_memory import HostPinning
from offload_core.memory.byte_budget import ByteBudget
from offload_core.memory.staging_size import ALIGNMENT_BYTES, lease_bytes

logger = logging.getLogger(__name__)


def arena_bytes(capacity_bytes: int) -> int:
    """Return the size of an arena with a reserve for all of a pool's memory. The reserve takes no memory until used."""
    return 2 * capacity_bytes + ALIGNMENT_BYTES


class LoadShare(ByteBudget):
    """The share of a pool for the loads of one tier, made by :meth:`StagingPool.add_load_share`.

    Args:
        limit_bytes: bytes that these loads may hold at once.
        private_start: offset in the arena, in bytes, of a piece that only these loads use.
        private_stop: offset of the end of that piece; equal to ``private_start`` for no piece.
    """

    def __init__(self, limit_bytes: int, private_start: int, private_stop: int) -> None:
        super().__init__(limit_bytes)
        self.private_start = private_start
        self.private_stop = private_stop


class Lease:
    """A piece of staging memory of ``nbytes`` bytes. Release it exactly once, after the last use of its views."""

    def __init__(self, pool: StagingPool, offset: int, nbytes: int, share: LoadShare | None) -> None:
        self.nbytes = nbytes
        self._pool = pool
        self._offset = offset
        self._reserved = lease_bytes(nbytes)
        self._share = share
        """The share of the load that holds it; ``None`` for a store's lease."""
        self._released = False

    @property
    def offset(self) -> int:
        """Position of the lease in the arena, in bytes."""
        return self._offset

    @property
    def view(self) -> memoryview:
        """Writable bytes of the lease, ``nbytes`` long."""
        self._check_held()
        return self._pool.memory[self._offset : self._offset + self.nbytes]

    @property
    def tensor(self) -> torch.Tensor:
        """The same bytes as an int8 tensor of shape ``(nbytes,)``."""
        self._check_held()
        return self._pool.tensor[self._offset : self._offset + self.nbytes]

    def release(self) -> None:
        """Return the memory to the pool.

        Raises:
            RuntimeError: the lease was already released; its memory may belong to another lease now.
        """
        self._check_held()
        self._released = True
        self._pool._release(self)

    def _check_held(self) -> None:
        if self._released:
            raise RuntimeError(f"staging lease of {self.nbytes} bytes at {self._offset} is used after its release")


@dataclass
class _ReplacedGroup:
    """Leases that were replaced together, and limits that are higher until the last of them is released."""

    leases: set[Lease]
    limits: Sequence[tuple[ByteBudget, int]]

    def withdraw(self) -> None:
        for budget, nbytes in self.limits:
            budget.withdraw(nbytes)


class StagingPool:
    """A byte budget of staging memory.

    Thread-safe. It uses first fit over a sorted free list, since leases are few (one per object in flight) and
    short-lived. Loads fill the arena from its start. Stores fill their part from the arena's end, so that hung stores
    cannot split the loads' part.

    Args:
        capacity_bytes: rounded down to a multiple of 4096.
        store_share: share of the capacity, at the arena's end, that stores may hold, from 0 to 1.
        pinning: pins the memory, if a GPU copies to and from it. Memory that cannot be pinned is used unpinned.
        arena: page-aligned memory of at least that capacity, such as memory that another process maps too. The
            memory beyond the capacity, but for one page, is the reserve. It is neither pinned nor written at the start.
            By default, the pool maps its own memory, without a reserve.
    """

    def __init__(
        self,
        capacity_bytes: int,
        store_share: float,
        pinning: HostPinning | None = None,
        arena: memoryview | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        if self.capacity_bytes <= 0:
            raise ValueError(f"staging capacity is {capacity_bytes} bytes; set it to {ALIGNMENT_BYTES} or more")
        self.memory = memoryview(mmap.mmap(-1, self.capacity_bytes)) if arena is None else arena
        self.tensor = torch.frombuffer(self.memory, dtype=torch.int8)
        self.tensor[: self.capacity_bytes].zero_()
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, self.capacity_bytes)]
        # A page between them, so that no lease is partly pinned.
        self._reserve_start = self.capacity_bytes + ALIGNMENT_BYTES
        self._reserve_bytes = max(0, (len(self.memory) - self._reserve_start) // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
        if self._reserve_bytes:
            self._free.append((self._reserve_start, self._reserve_bytes))
        self._end = self.capacity_bytes
        """The offset that new leases end at, or before."""
        self._leases: dict[Lease, None] = {}
        self._replaced: dict[Lease, _ReplacedGroup] = {}
        self._replaced_bytes = 0
        self._used_bytes = 0
        self._stores = ByteBudget(int(self.capacity_bytes * store_share))
        self._stores_start = self.capacity_bytes - self._stores.limit_bytes
        self._common_start = 0  # end of the private pieces of all tiers' loads
        self._pinning = pinning
        if pinning is not None:
            try:
                pinning.register(self.tensor.data_ptr(), self.capacity_bytes)
            except OSError as error:
                self._pinning = None
                logger.warning("staging memory is not pinned, so a GPU's copies are slower: %s", error)

    def close(self) -> None:
        """Unpin the memory, which stays usable. Idempotent; no copy to or from a GPU may be under way."""
        pinning, self._pinning = self._pinning, None
        if pinning is not None:
            try:
                pinning.unregister(self.tensor.data_ptr())
            except OSError as error:
                logger.warning(
                    "staging memory stays pinned until the process ends; it could not be unpinned: %s", error
                )

    @property
    def used_bytes(self) -> int:
        """Bytes leased now; each lease counts as a multiple of 4096."""
        return self._used_bytes

    @property
    def replaced_bytes(self) -> int:
        """Bytes of the reserve that may be leased now."""
        return self._replaced_bytes

    @property
    def store_bytes(self) -> int:
        """Bytes leased by stores now; each lease counts as a multiple of 4096."""
        return self._stores.held_bytes

    @property
    def store_limit_bytes(self) -> int:
        """Bytes that stores may lease at once."""
        return self._stores.limit_bytes

    def add_load_share(self, limit_bytes: int, private_bytes: int) -> LoadShare:
        """Make a share for the loads of one tier. Call it before the first lease.

        Args:
            limit_bytes: bytes that these loads may hold at once, in their private piece or in the common part.
            private_bytes: size of the private piece, a multiple of 4096.
        """
        start, self._common_start = self._common_start, self._common_start + private_bytes
        return LoadShare(limit_bytes, start, self._common_start)

    def replace_held(self, budgets: Sequence[ByteBudget] = ()) -> int:
        """Let the reserve take the place of all memory that is leased now, as far as the reserve is large enough.

        The leases stay as they are. The limits that they count towards rise by their bytes, each until its release.

        Args:
            budgets: more limits, which rise by all that they count, until the last of the leases is released.

        Returns:
            The number of bytes of the reserve that may be leased from now on.
        """
        group = _ReplacedGroup(set(), [(budget, budget.replace_held()) for budget in budgets])
        with self._lock:
            before = self._replaced_bytes
            for lease in self._leases:
                if lease not in self._replaced and self._replaced_bytes + lease._reserved <= self._reserve_bytes:
                    group.leases.add(lease)
                    self._replaced[lease] = group
                    self._change_reserve(lease._reserved)
                    (lease._share or self._stores).replace(lease._reserved)
            added = self._replaced_bytes - before
        if not added:
            group.withdraw()
        return added

    def _change_reserve(self, nbytes: int) -> None:
        """Let leases use more or less of the reserve."""
        self._replaced_bytes += nbytes
        self._end = self._reserve_start + self._replaced_bytes if self._replaced_bytes else self.capacity_bytes

    def try_acquire(self, nbytes: int, *, for_store: bool) -> Lease | None:
        """Lease ``nbytes`` bytes now, or return ``None`` if the pool, or the stores' part of it, is full."""
        with self._lock:
            if for_store:
                return self._take_for_store(nbytes)
            share = self._unlimited_share()
            share.try_take(lease_bytes(nbytes))
            return self._take_for_load(nbytes, share)

    def try_acquire_all(self, sizes: Sequence[int], share: LoadShare | None = None) -> list[Lease] | None:
        """Lease a piece of each size (in bytes) now, for a load within ``share``; all of them or, with ``None``, none.

        A batch that held some leases during its wait for the others might wait for ever for the memory between them.
        """
        share = share or self._unlimited_share()
        leases: list[Lease] = []
        with self._lock:
            if not share.try_take(sum(map(lease_bytes, sizes))):
                return None
            for nbytes in sizes:
                lease = self._take_for_load(nbytes, share)
                if lease is None:
                    share.give_back(sum(map(lease_bytes, sizes[len(leases) :])))
                    for taken in leases:
                        taken._released = True
                        self._free_lease(taken)
                    return None
                leases.append(lease)
        return leases

    def convert_to_store(self, lease: Lease) -> bool:
        """Turn a load's lease into a store's; return ``False``, without any change, if the stores' limit is reached.

        A lease in the private piece of one tier's loads is refused too: a hung store must not take that piece away.
        So is a replaced lease.
        """
        lease._check_held()
        with self._lock:
            share = lease._share
            if share is None or lease._offset < self._common_start or lease in self._replaced:
                return False
            if not self._stores.try_take(lease._reserved):
                return False
            share.give_back(lease._reserved)
            lease._share = None
        return True

    def _unlimited_share(self) -> LoadShare:
        """Return a share without a limit or a private piece."""
        return LoadShare(len(self.memory), 0, 0)

    def _take_for_load(self, nbytes: int, share: LoadShare) -> Lease | None:
        """Take the first piece that fits, in the common part, then in the share's private piece.

        The share counts the bytes already.
        """
        reserved = lease_bytes(nbytes)
        for start, stop in ((self._common_start, self._end), (share.private_start, share.private_stop)):
            for index, (offset, size) in enumerate(self._free):
                first = max(offset, start)
                if min(offset + size, stop) - first >= reserved:
                    return self._take(index, first, Lease(self, first, nbytes, share))
        return None

    def _take_for_store(self, nbytes: int) -> Lease | None:
        """Take the end of the last piece that fits, in the stores' part."""
        reserved = lease_bytes(nbytes)
        if not self._stores.try_take(reserved):  # leases turned from loads lie anywhere
            return None
        for index in reversed(range(len(self._free))):
            offset, size = self._free[index]
            first = min(offset + size, self._end) - reserved
            if first >= max(offset, self._stores_start):
                return self._take(index, first, Lease(self, first, nbytes, None))
        self._stores.give_back(reserved)
        return None

    def _take(self, index: int, first: int, lease: Lease) -> Lease:
        """Cut ``lease``, which starts at ``first``, out of a free piece."""
        offset, size = self._free[index]
        remainders = ((offset, first - offset), (first + lease._reserved, offset + size - first - lease._reserved))
        self._free[index : index + 1] = [rest for rest in remainders if rest[1]]
        self._used_bytes += lease._reserved
        self._leases[lease] = None
        return lease

    def _release(self, lease: Lease) -> None:
        with self._lock:
            self._free_lease(lease)

    def _free_lease(self, lease: Lease) -> None:
        offset, reserved = lease._offset, lease._reserved
        self._used_bytes -= reserved
        budget = lease._share or self._stores
        budget.give_back(reserved)
        self._leases.pop(lease, None)
        if (group := self._replaced.pop(lease, None)) is not None:
            self._change_reserve(-reserved)
            budget.withdraw(reserved)
            group.leases.discard(lease)
            if not group.leases:
                group.withdraw()
        insort(self._free, (offset, reserved))
        index = self._free.index((offset, reserved))
        if index + 1 < len(self._free) and offset + reserved == self._free[index + 1][0]:
            self._free[index] = (offset, reserved + self._free.pop(index + 1)[1])
        if index > 0 and sum(self._free[index - 1]) == offset:
            previous = self._free[index - 1]
            self._free[index - 1] = (previous[0], previous[1] + self._free.pop(index)[1])
