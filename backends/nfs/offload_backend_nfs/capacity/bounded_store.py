"""A store with a capacity: the work that a tier with a limit does around its medium.

Every object is written only if it does not exist. So each object counts once, even if many processes store it at the
same time. Objects leave through the account only. So each object is subtracted once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from offload_backend_nfs.capacity.account_options import AccountOptions
from offload_backend_nfs.capacity.account_state import AccountState
from offload_backend_nfs.capacity.control_record import UnknownVersionError
from offload_backend_nfs.capacity.housekeeping import Housekeeping
from offload_backend_nfs.capacity.lease import Lease
from offload_backend_nfs.capacity.pending_evictions import PendingEvictions
from offload_backend_nfs.capacity.ports import AccountFiles, ObjectFiles
from offload_backend_nfs.capacity.quota import ObjectReservation, Quota
from offload_backend_nfs.capacity.shared_record import SharedRecord
from offload_backend_nfs.capacity.usage_log import UsageLog
from offload_backend_nfs.storage.failures import StoreRejections, means_full
from offload_core.api import ObjectKey, StoreOutcome, StoreSeal, TierLogger


class ReserveResult(NamedTuple):
    """The answer to a request for capacity: per key a reservation, or the outcome without one."""

    reservations: list[ObjectReservation | None]
    outcomes: list[StoreOutcome | None]
    evicted: list[ObjectKey]


class BoundedStore:
    """Objects under one limit for all processes that use them. Calls block unless noted, and may come from any thread.

    Args:
        clock: returns seconds, and includes the time during which the machine sleeps.
        now: returns seconds since the epoch.
        sleep: waits for a number of seconds.
        stopped: returns ``True`` once long work should end early.
    """

    def __init__(
        self,
        files: AccountFiles,
        objects: ObjectFiles,
        options: AccountOptions,
        log: TierLogger,
        *,
        clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._objects = objects
        self._log = log
        self._record = SharedRecord(files, clock, log, sleep)
        self._lease = Lease(self._record, files, options, clock, log)
        self._quota = Quota(self._record, self._lease, options)
        self._evictions = PendingEvictions(self._record, self._lease, files, objects, options, clock, log)
        self._usage_log = UsageLog(files, clock, now, log)
        self._housekeeping = Housekeeping(
            self._record,
            self._lease,
            self._quota,
            self._evictions,
            self._usage_log,
            files,
            objects,
            options,
            clock,
            log,
            stopped,
        )
        self._rejections = StoreRejections(log)
        self._outage: str | None = None
        shortest = min(options.lease_seconds / 6, options.grace_seconds / 6 or options.lease_seconds)
        self.step_seconds = max(0.05, min(10.0, shortest))
        """The longest time between two calls of :meth:`step`."""

    @property
    def state(self) -> AccountState:
        """The newest state of the account that this process has seen."""
        return self._record.state

    @property
    def member_id(self) -> str:
        """This process's name in the account."""
        return self._lease.member_id

    @property
    def is_housekeeper(self) -> bool:
        """``True`` if this process does the housekeeping for all."""
        return self._housekeeping.is_housekeeper

    @property
    def step_is_urgent(self) -> bool:
        """``True`` if the housekeeper should soon call :meth:`step`, to count or to evict objects."""
        return self._housekeeping.eviction_needed or not self._record.state.is_usable

    def open(self) -> None:
        """Join the account. A failure is logged only: objects can be loaded without the account."""
        with self._outage_tolerated():
            self._lease.join()
            self._housekeeping.count_new_account()

    def close(self) -> None:
        """Flush the usage log and leave the account. Idempotent."""
        with self._outage_tolerated():
            self._usage_log.flush()
            self._quota.leave()

    def step(self) -> None:
        """Do the housekeeping: renew the lease, read the account, and, as the housekeeper, count and evict for all."""
        with self._outage_tolerated():
            self._housekeeping.step()

    def refresh(self) -> None:
        """Read the changes of other processes.

        Raises:
            OSError: the medium failed.
        """
        self._record.refresh()

    def hidden(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return, per key, whether its object will soon be deleted and must not be loaded. Does not block."""
        return self._evictions.hidden(keys)

    def pin(self, keys: Iterable[ObjectKey]) -> None:
        """Pin objects: they are not evicted until :meth:`unpin`. Does not block."""
        self._evictions.pin(keys)

    def unpin(self, keys: Iterable[ObjectKey]) -> None:
        """Undo :meth:`pin`."""
        self._evictions.unpin(keys)

    def mark_used(self, keys: Collection[ObjectKey]) -> None:
        """Mark objects as used now. Does not block."""
        self._evictions.mark_used(keys)
        self._usage_log.record(keys)

    def touch(self, keys: Sequence[ObjectKey], spare: Sequence[bool]) -> None:
        """Make objects the most recently used ones, in this order. Does not block.

        A pending eviction of a kept object is withdrawn, as by a use. A pinned object does not become spare.
        """
        pinned = self._evictions.pinned
        touches = [(key, flag) for key, flag in zip(keys, spare, strict=True) if not (flag and key in pinned)]
        self._evictions.mark_used([key for key, is_spare in touches if not is_spare])
        self._usage_log.record_touches(touches)

    def reserve(self, keys: Sequence[ObjectKey], nbytes: Sequence[int], spare: Sequence[bool] = ()) -> ReserveResult:
        """Reserve capacity for the objects that do not exist yet, and for the kept ones among them first.

        If an object exists, this is a use of it. A spare object that exists stays as it is. A full medium has no
        capacity.

        Raises:
            OSError: the medium failed.
        """
        existing, hidden = self._objects.contains(keys), self._evictions.hidden(keys)
        outcomes: list[StoreOutcome | None] = []
        for exists, is_hidden in zip(existing, hidden, strict=True):
            # A hidden object can be stored again after its deletion.
            outcomes.append(StoreOutcome.REJECTED if is_hidden else StoreOutcome.ALREADY_PRESENT if exists else None)
        flags = spare or [False] * len(keys)
        answered = zip(keys, outcomes, flags, strict=True)
        self.mark_used([key for key, outcome, is_spare in answered if outcome is not None and not is_spare])
        reservations: list[ObjectReservation | None] = [None] * len(outcomes)
        for is_spare in (False, True):
            missing = [index for index, outcome in enumerate(outcomes) if outcome is None and flags[index] == is_spare]
            if missing and self._outage is None:
                made = self._reserve([nbytes[index] for index in missing], is_spare)
                for index, reservation in zip(missing, made, strict=True):
                    reservations[index] = reservation
            for index in missing:
                if reservations[index] is None:
                    outcomes[index] = StoreOutcome.REJECTED
        return ReserveResult(reservations, outcomes, self._evictions.take_evicted())

    def _reserve(self, sizes: Sequence[int], is_spare: bool) -> list[ObjectReservation | None]:
        try:
            return self._quota.reserve(sizes, spare=is_spare)
        except OSError as error:
            if not self._rejections.covers(error):
                raise
            return [None] * len(sizes)

    def store(
        self,
        key: ObjectKey,
        buffer: memoryview,
        reservation: ObjectReservation | None,
        seal: StoreSeal | None = None,
    ) -> StoreOutcome:
        """Write an object into its reservation. Without a reservation, make one first.

        Args:
            seal: seals the buffer meanwhile; ``None`` if it is sealed.

        Raises:
            OSError: the medium failed. The object may exist or not; if it may exist, its bytes count.
        """
        if reservation is None:
            (reservation,), (outcome,), _ = self.reserve([key], [len(buffer)])
            if reservation is None:
                return outcome or StoreOutcome.REJECTED
        if len(buffer) != reservation.nbytes or not self._quota.may_write(reservation):
            self._quota.end(reservation, written=False)
            return StoreOutcome.REJECTED
        try:
            written = self._objects.write_new(key, buffer, seal)
        except BaseException as error:
            self._quota.end(reservation, written=self._may_exist(key))
            if isinstance(error, OSError) and self._rejections.covers(error):
                return StoreOutcome.REJECTED
            raise
        self._rejections.store_succeeded()
        self._quota.end(reservation, written=written)
        if written:
            self._usage_log.record_stored(key, is_spare=reservation.is_spare)
        elif not reservation.is_spare:  # another process may just have stored it as spare
            self.touch([key], [False])
        return StoreOutcome.STORED if written else StoreOutcome.ALREADY_PRESENT

    def release(self, reservations: Iterable[ObjectReservation | None]) -> None:
        """End reservations, used or not, and settle the quota if that is due. On a full medium a later call settles it.

        Raises:
            OSError: the medium failed. The next call returns the capacity.
        """
        for reservation in reservations:
            if reservation is not None:
                self._quota.end(reservation, written=False)
        try:
            self._quota.settle()
        except OSError as error:
            if not self._rejections.covers(error):
                raise

    def release_without_settling(self, reservation: ObjectReservation) -> None:
        """End an unused reservation. The quota is settled later. Does not block."""
        self._quota.end(reservation, written=False)

    def delete(self, keys: Collection[ObjectKey]) -> None:
        """Delete objects, and subtract them from the account. On a full medium, the next scan subtracts them.

        Raises:
            OSError: the medium failed. The remaining objects are deleted later.
        """
        try:
            self._evictions.delete(keys)
        except OSError as error:
            if not isinstance(error, UnknownVersionError) and not means_full(error):
                raise
            self._evictions.recount_due = True
            if (refusal := self._objects.remove(list(keys)).refusal) is not None:
                raise refusal from error

    def _may_exist(self, key: ObjectKey) -> bool:
        with suppress(OSError):
            return self._objects.contains([key])[0]
        return True

    @contextmanager
    def _outage_tolerated(self) -> Iterator[None]:
        """Continue if the account cannot be kept. Until it can be kept again, stores are rejected."""
        try:
            yield
        except OSError as error:
            self._set_outage(error)
        else:
            self._set_outage(None)

    def _set_outage(self, error: OSError | None) -> None:
        """Log once that the account cannot be kept, and once that it can be kept again."""
        outage = None if error is None else f"{type(error).__name__}: {error}"
        if outage and self._outage is None:
            self._log.warning(
                "the account of the shared objects cannot be kept: %s. Until it can, stores are rejected; "
                "loads continue",
                outage,
            )
        elif outage is None and self._outage is not None:
            self._log.warning("the account of the shared objects can be kept again; stores continue")
        self._outage = outage
