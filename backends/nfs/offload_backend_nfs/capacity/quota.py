"""The quota of this process: the part of the capacity that it may write.

All processes, on any number of hosts, keep one limit together. A process first extends its quota in the shared record
and then writes within its quota. Quotas grow in units, so that the record changes rarely. If the capacity is too small
for units, quotas grow by the exact need.

At every moment, the bytes of all objects, including those being written, are at most ``used_bytes`` plus all quotas.
That sum is at most the capacity.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from offload_backend_nfs.capacity.account_options import AccountOptions
from offload_backend_nfs.capacity.account_state import AccountState, Member
from offload_backend_nfs.capacity.lease import Lease
from offload_backend_nfs.capacity.shared_record import Edit, SharedRecord


class ObjectReservation:
    """Bytes of the quota that are reserved for one object. Belongs to its :class:`Quota`."""

    def __init__(self, nbytes: int, member_id: str, *, is_spare: bool) -> None:
        self.nbytes = nbytes
        self.member_id = member_id
        self.is_spare = is_spare
        self.ended = False
        self.released = False
        """``True`` if the contract's store reservation was released first. Then the store that uses these bytes ends
        them."""


class Quota:
    """The bytes that this process may write. Calls block, and may come from any thread."""

    def __init__(self, record: SharedRecord, lease: Lease, options: AccountOptions) -> None:
        self._record = record
        self._lease = lease
        self._lock = lease.lock  # around the numbers
        self._options = options
        self._quota_bytes = 0
        self._reserved_bytes = 0
        self._written_bytes = 0  # and not yet moved to the record's used_bytes
        self._extended = False
        """``True`` if the quota was extended since the last :meth:`settle_if_idle`."""
        lease.on_reset.append(self._reset)

    def leave(self) -> None:
        """Return the quota and end the membership. Idempotent.

        Raises:
            OSError: the medium failed. Other processes will take this process for dead.
        """
        with self._record.lock:
            written = self._written_bytes
            self._lease.leave(lambda state: _moved_to_used(state, written))

    def reserve(self, sizes: Sequence[int], *, spare: bool = False) -> list[ObjectReservation | None]:
        """Reserve bytes for objects, in order. Extend the quota if it is too small.

        Args:
            sizes: the bytes of each object.
            spare: the objects are spare. They get bytes below the low watermark only, and none while a kept object
                waits for an eviction. They never cause an eviction.

        Returns:
            Per object its reservation, or ``None`` if there is not enough capacity.

        Raises:
            OSError: the medium failed.
        """
        with self._lock:
            if not self._lease.allows_writes or (spare and self._is_short(self._record.state)):
                return [None] * len(sizes)
            if self._free_bytes >= sum(sizes):
                return self._take(sizes, spare)
        with self._record.lock:
            with self._lock:
                if self._free_bytes >= sum(sizes):  # another thread has extended the quota meanwhile
                    return self._take(sizes, spare)
            self._extend(sizes, spare)
            if spare and self._is_short(self._record.state):
                return [None] * len(sizes)
            with self._lock:
                return self._take(sizes, spare)

    def may_write(self, reservation: ObjectReservation) -> bool:
        """Return whether a reservation is still valid. It is not if this process was taken for dead."""
        is_current = not reservation.ended and reservation.member_id == self._lease.member_id
        return is_current and self._lease.allows_writes

    def end(self, reservation: ObjectReservation, *, written: bool) -> None:
        """End a reservation. Idempotent.

        Args:
            written: ``True`` if the object exists and uses the bytes; ``False`` frees the bytes.
        """
        with self._lock:
            if not reservation.ended and reservation.member_id == self._lease.member_id:
                self._reserved_bytes -= reservation.nbytes
                self._written_bytes += reservation.nbytes if written else 0
            reservation.ended = True

    def settle(self) -> None:
        """Move written bytes to the record's ``used_bytes``, and return bytes that are not reserved.

        This holds for quotas without units. With units, only :meth:`settle_if_idle` settles.

        Raises:
            OSError: the medium failed. The quota stays, and the next call settles it.
        """
        if not self._options.quota_unit:
            self._settle()

    def settle_if_idle(self, *, eviction_needed: bool) -> None:
        """Settle if the quota was not extended since the last call, or if objects must be evicted.

        Raises:
            OSError: the medium failed. The quota stays, and the next call settles it.
        """
        idle, self._extended = not self._extended, False
        if idle or eviction_needed:
            self._settle()

    def _reset(self) -> None:
        self._quota_bytes = self._reserved_bytes = self._written_bytes = 0

    def _settle(self) -> None:
        with self._record.lock:
            with self._lock:
                written, returned, quota = self._written_bytes, self._free_bytes, self._quota_bytes
                if not self._lease.member_id or not (returned or written):
                    return
                self._reserved_bytes += returned  # so that no thread reserves these bytes while they are returned
            try:
                self._apply(lambda state: self._with_quota(state, quota - returned, written), written)
            finally:
                with self._lock:
                    self._reserved_bytes = max(0, self._reserved_bytes - returned)

    def _is_short(self, state: AccountState) -> bool:
        """Return whether there is no capacity for spare objects: kept ones use it, or wait for it."""
        return state.occupied_bytes > self._limit(spare=True) or state.missing_bytes(self._limit(spare=False)) > 0

    def _limit(self, *, spare: bool) -> int:
        share = self._options.low_watermark if spare else 1.0  # else spare objects would bring on the next eviction
        return int(share * self._options.capacity_bytes)

    def _extend(self, sizes: Sequence[int], spare: bool) -> None:
        """Extend the quota by the missing bytes, as far as the capacity allows, and by a unit if there is plenty."""
        with self._lock:
            quota, written, free = self._quota_bytes, self._written_bytes, self._free_bytes
        self._extended = True

        def edit(state: AccountState) -> AccountState | None:
            member_id = self._lease.member_id
            if not state.is_usable or not state.has_live(member_id) or (spare and self._is_short(state)):
                return None
            # Only this process changes its quota, and it holds a lock. So the quota is set, not added to.
            available = self._limit(spare=spare) - state.occupied_bytes + state.members[member_id].quota_bytes - quota
            fitting = sum(_fitting(sizes, free + available))
            missing = max(0, fitting - free)
            waits = state.missing_bytes(self._limit(spare=False)) > 0
            rejected = state.rejected_bytes if waits else 0  # what has room by now needs no eviction later
            if fitting != sum(sizes) and not spare:
                rejected = max(rejected, sum(sizes))
            if not missing and rejected == state.rejected_bytes:
                return None
            unit = min(self._options.quota_unit, max(0, available - missing) // (2 * len(state.members)))
            changed = self._with_quota(state, quota + missing + unit, written)
            return changed and changed.model_copy(update={"rejected_bytes": rejected})

        self._apply(edit, written)

    def _with_quota(self, state: AccountState, quota_bytes: int, written: int) -> AccountState | None:
        """Return ``state`` with a quota of ``quota_bytes``, of which ``written`` bytes move to the objects."""
        member_id = self._lease.member_id
        if not state.has_live(member_id):
            return None
        members = {**state.members, member_id: Member(quota_bytes=quota_bytes - written)}
        return state.model_copy(update={"members": members, **_moved_to_used(state, written)})

    def _apply(self, edit: Edit, written: int) -> None:
        """Make a change that settles ``written`` bytes, and adopt the quota that it sets."""
        made: AccountState | None = None

        def remembered(state: AccountState) -> AccountState | None:
            nonlocal made
            made = edit(state)
            return made

        self._record.change(remembered)
        if made is not None:
            with self._lock:
                self._quota_bytes = made.members[self._lease.member_id].quota_bytes
                self._written_bytes -= written

    @property
    def _free_bytes(self) -> int:
        return self._quota_bytes - self._reserved_bytes - self._written_bytes

    def _take(self, sizes: Sequence[int], spare: bool) -> list[ObjectReservation | None]:
        reservations: list[ObjectReservation | None] = []
        for size in sizes:
            fits = size <= self._free_bytes
            reservations.append(ObjectReservation(size, self._lease.member_id, is_spare=spare) if fits else None)
            self._reserved_bytes += size if fits else 0
        return reservations


def _moved_to_used(state: AccountState, written: int) -> dict[str, int]:
    return {"used_bytes": state.used_bytes + written, "written_bytes": state.written_bytes + written}


def _fitting(sizes: Iterable[int], available: int) -> Iterator[int]:
    """Yield the sizes that fit into ``available`` bytes one after the other."""
    for size in sizes:
        if size <= available:
            available -= size
            yield size
