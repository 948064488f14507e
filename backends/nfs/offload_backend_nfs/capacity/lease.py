"""The part of the capacity that this process may write: one limit for all processes, on any number of hosts.

A process first *claims* bytes in the shared record, then writes within its claim. Claims come in grains, so that the
record is changed rarely; a capacity too small for grains is claimed exactly. At every moment the bytes of all objects,
also of those being written, are at most the record's ``used_bytes`` and claims, and these at most the capacity.

Each process keeps a lease: a small object of its own, which it writes anew before it would run out. No clocks are
compared: the others measure, each by its own clock, how long they have seen it unchanged. A process that could not
renew its lease for half its life begins to write nothing more, so that it has stopped before it is taken for dead.
"""

from __future__ import annotations

import errno
import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from offload_backend_nfs.capacity.account_state import AccountState, Owner
from offload_backend_nfs.capacity.ports import SmallObjects
from offload_backend_nfs.capacity.shared_record import Edit, Generations

logger = logging.getLogger(__name__)

OWNERS = "owners"
_GRAINS = 64
_SMALLEST_GRAIN_BYTES = 1024 * 1024
_RENEWALS_PER_LEASE = 8


@dataclass(frozen=True)
class AccountOptions:
    """What an account is kept by.

    Args:
        capacity_bytes: limit on all objects of the prefix.
        low_watermark: part of the capacity that an eviction leaves.
        high_watermark: part of the capacity above which objects are evicted.
        grace_seconds: how long objects stay after they were condemned.
        lease_seconds: a process whose lease was not renewed for so long is dead.
        grain_bytes: what is claimed beyond what is needed; ``None`` for a 64th of the capacity, or nothing where that
            is less than 1 MiB.
    """

    capacity_bytes: int
    low_watermark: float = 0.8
    high_watermark: float = 0.9
    grace_seconds: float = 60.0
    lease_seconds: float = 60.0
    grain_bytes: int | None = None

    @property
    def grain(self) -> int:
        """Bytes that are claimed beyond what is needed."""
        if self.grain_bytes is not None:
            return self.grain_bytes
        grain = self.capacity_bytes // _GRAINS
        return grain if grain >= _SMALLEST_GRAIN_BYTES else 0


class Room:
    """Bytes of a claim, for one object. Belongs to its :class:`Claim`."""

    def __init__(self, nbytes: int, owner: str) -> None:
        self.nbytes = nbytes
        self.owner = owner
        self.ended = False
        self.released = False
        """Whether the reservation that it was taken for is over; whoever uses it then ends it."""


class Claim:
    """This process as one of the account's owners. Calls block, and may come from any thread.

    Args:
        clock: seconds that pass also while the machine sleeps.
    """

    def __init__(
        self, record: Generations, small: SmallObjects, options: AccountOptions, clock: Callable[[], float]
    ) -> None:
        self._record = record
        self._small = small
        self._options = options
        self._clock = clock
        self.owner = ""
        """This process's name in the record; empty while it has none. A new one after it was taken for dead."""
        self._lock = threading.Lock()  # around the numbers; never held while the medium is waited for
        self._claim_bytes = 0
        self._reserved_bytes = 0
        self._written_bytes = 0  # and not yet moved to the record's used_bytes
        self._drawn_on = False
        self._renewed_seconds = -float("inf")
        self._renewals = 0
        record.watchers.append(self._beat_along)

    @property
    def fit(self) -> bool:
        """Whether this process may write: it is one of the owners and has renewed its lease in time."""
        return bool(self.owner) and self._clock() - self._renewed_seconds < self._options.lease_seconds / 2

    def join(self) -> None:
        """Become one of the owners, with no claim yet; the keeper, where there is none.

        Raises:
            OSError: the medium failed, or cannot be written.
        """
        with self._record.lock:
            with self._lock:
                self._claim_bytes = self._reserved_bytes = self._written_bytes = 0
                self.owner = ""
            owner, started, self._renewals = secrets.token_hex(8), self._clock(), 0
            self._small.create(f"{OWNERS}/{owner}", b"0")
            if self._small.create(f"{OWNERS}/{owner}", b"0"):
                raise OSError(
                    errno.EOPNOTSUPP,
                    "this storage creates a file although it is there, so processes cannot keep a capacity together; "
                    "use a server that knows conditional writes (S3's If-None-Match), or leave the capacity out",
                )

            def edit(state: AccountState) -> AccountState:
                keeper = state.keeper if state.keeper in state.owners else owner
                return state.model_copy(update={"owners": {**state.owners, owner: Owner()}, "keeper": keeper})

            self._record.change(edit)
            self.owner, self._renewed_seconds = owner, started

    def leave(self) -> None:
        """Give back everything and be no owner any more. Idempotent.

        Raises:
            OSError: the medium failed; the others will take this process for dead.
        """
        with self._record.lock:
            owner, written = self.owner, self._written_bytes
            if not owner:
                return
            self.owner = ""

            def edit(state: AccountState) -> AccountState | None:
                if self._is_lost(state, owner):
                    return None
                owners = {name: value for name, value in state.owners.items() if name != owner}
                keeper = "" if state.keeper == owner else state.keeper
                return state.model_copy(update={"owners": owners, "keeper": keeper, **_moved(state, written)})

            self._record.change(edit)
            self._small.delete([f"{OWNERS}/{owner}"])

    def renew(self) -> None:
        """Renew the lease and read the newest state; a process that was taken for dead joins again.

        Raises:
            OSError: the medium failed, or cannot be written.
        """
        with self._record.lock:
            if self.owner:
                self.beat()
                if not self._is_lost(self._record.refresh(), self.owner):
                    return
                logger.warning(
                    "the account has taken this process for dead, which did not renew its lease of %g s in time, or "
                    "has begun anew; what was claimed is lost, and what was stored is counted by the next scan",
                    self._options.lease_seconds,
                )
            self.join()

    def beat(self) -> None:
        """Renew the lease, unless that was just done or this process has none."""
        started = self._clock()
        if self.owner and started - self._renewed_seconds >= self._options.lease_seconds / _RENEWALS_PER_LEASE:
            self._renewals += 1
            self._small.write(f"{OWNERS}/{self.owner}", b"%d" % self._renewals)
            self._renewed_seconds = started

    def _beat_along(self, _: AccountState) -> None:
        """Renew the lease while a change of the record takes long because others are faster."""
        with suppress(OSError):  # the next renewal tells
            self.beat()

    def reserve(self, sizes: Sequence[int]) -> list[Room | None]:
        """Take room for objects of these bytes each, in order, from the claim; claim more where that is needed.

        Returns:
            Per object its room, or ``None`` where there is none.

        Raises:
            OSError: the medium failed.
        """
        with self._lock:
            if not self.fit:
                return [None] * len(sizes)
            if self._free_bytes >= sum(sizes):
                return self._take(sizes)
        with self._record.lock:
            with self._lock:
                if self._free_bytes >= sum(sizes):  # claimed by another thread meanwhile
                    return self._take(sizes)
            self._claim(sizes)
            with self._lock:
                return self._take(sizes)

    def may_write(self, room: Room) -> bool:
        """Whether ``room`` is still there: that of a process that was taken for dead is not."""
        return not room.ended and room.owner == self.owner and self.fit

    def end(self, room: Room, *, written: bool) -> None:
        """Note what became of ``room``: its object is there and takes it, or not. The second time nothing happens."""
        with self._lock:
            if not room.ended and room.owner == self.owner:
                self._reserved_bytes -= room.nbytes
                self._written_bytes += room.nbytes if written else 0
            room.ended = True

    def settle(self) -> None:
        """Without grains: move what was written to the record's objects, and give back what is not reserved.

        With grains nothing is done here, but by :meth:`settle_if_idle`.

        Raises:
            OSError: the medium failed; the claim stays, and the next call settles it.
        """
        if not self._options.grain:
            self._settle()

    def settle_if_idle(self, *, pressed: bool) -> None:
        """Settle, if nothing was claimed since the last time, or others are pressed for room.

        Raises:
            OSError: the medium failed; the claim stays, and the next call settles it.
        """
        idle, self._drawn_on = not self._drawn_on, False
        if idle or pressed:
            self._settle()

    def _settle(self) -> None:
        with self._record.lock:
            with self._lock:
                written, back, claim = self._written_bytes, self._free_bytes, self._claim_bytes
                if not self.owner or not (back or written):
                    return
                self._reserved_bytes += back  # so that nobody takes it while it is on its way
            try:
                self._apply(lambda state: self._with_claim(state, claim - back, written), written)
            finally:
                with self._lock:
                    self._reserved_bytes = max(0, self._reserved_bytes - back)

    def _claim(self, sizes: Sequence[int]) -> None:
        """Claim what is missing of ``sizes``, as far as there is room, and a grain where there is plenty."""
        with self._lock:
            claim, written, free = self._claim_bytes, self._written_bytes, self._free_bytes
        self._drawn_on = True

        def edit(state: AccountState) -> AccountState | None:
            if not state.counted or self._is_lost(state, self.owner):
                return None
            # Only this process changes its claim, under a lock that is held: it is set and not added to.
            room = self._options.capacity_bytes - state.occupied_bytes + state.owners[self.owner].claim_bytes - claim
            fitting = sum(_fitting(sizes, free + room))
            more = max(0, fitting - free)
            wanted = state.wanted_bytes if fitting == sum(sizes) else max(state.wanted_bytes, sum(sizes))
            if not more and wanted == state.wanted_bytes:
                return None
            grain = min(self._options.grain, max(0, room - more) // (2 * len(state.owners)))
            changed = self._with_claim(state, claim + more + grain, written)
            return changed and changed.model_copy(update={"wanted_bytes": wanted})

        self._apply(edit, written)

    def _with_claim(self, state: AccountState, claim_bytes: int, written: int) -> AccountState | None:
        """Return ``state`` with ``written`` of a claim of ``claim_bytes`` moved to the objects."""
        if self._is_lost(state, self.owner):
            return None
        owners = {**state.owners, self.owner: Owner(claim_bytes=claim_bytes - written)}
        return state.model_copy(update={"owners": owners, **_moved(state, written)})

    def _apply(self, edit: Edit, written: int) -> None:
        """Make a change that settles ``written`` bytes, and take up what it makes of the claim."""
        made: AccountState | None = None

        def noted(state: AccountState) -> AccountState | None:
            nonlocal made
            made = edit(state)
            return made

        self._record.change(noted)
        if made is not None:
            with self._lock:
                self._claim_bytes = made.owners[self.owner].claim_bytes
                self._written_bytes -= written

    @staticmethod
    def _is_lost(state: AccountState, owner: str) -> bool:
        mine = state.owners.get(owner)
        return mine is None or mine.dead

    @property
    def _free_bytes(self) -> int:
        return self._claim_bytes - self._reserved_bytes - self._written_bytes

    def _take(self, sizes: Sequence[int]) -> list[Room | None]:
        rooms: list[Room | None] = []
        for size in sizes:
            fits = size <= self._free_bytes
            rooms.append(Room(size, self.owner) if fits else None)
            self._reserved_bytes += size if fits else 0
        return rooms


def _moved(state: AccountState, written: int) -> dict[str, int]:
    return {"used_bytes": state.used_bytes + written, "written_bytes": state.written_bytes + written}


def _fitting(sizes: Iterable[int], room: int) -> Iterator[int]:
    """Yield those of ``sizes`` that fit into ``room`` one after the other."""
    for size in sizes:
        if size <= room:
            room -= size
            yield size
