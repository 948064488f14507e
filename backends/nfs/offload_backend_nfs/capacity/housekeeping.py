"""The housekeeping of a shared account.

Every process renews its own lease and settles its own quota. One process at a time is the *housekeeper*: it scans,
evicts and removes dead members for all. The others watch the housekeeper's lease. If that lease expires, another
process takes over.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from offload_backend_nfs.capacity.account_options import AccountOptions
from offload_backend_nfs.capacity.account_state import AccountState
from offload_backend_nfs.capacity.lease import MAX_FILE_BYTES, Lease, lease_file
from offload_backend_nfs.capacity.pending_evictions import PendingEvictions
from offload_backend_nfs.capacity.ports import AccountFiles, ObjectFiles
from offload_backend_nfs.capacity.quota import Quota
from offload_backend_nfs.capacity.shared_record import SharedRecord
from offload_backend_nfs.capacity.unreferenced_files import UnreferencedFiles
from offload_backend_nfs.capacity.usage_log import Recency, UsageLog, recency
from offload_backend_nfs.storage.failures import ForeignFileError, means_full
from offload_core.api import ObjectKey, TierLogger

_BATCH_KEYS = 10_000
_ROOM_BYTES = 1024**2
_ROOM_KEYS = 64


class Housekeeping:
    """This process's part of the housekeeping. Calls block, one at a time.

    Args:
        clock: returns seconds, and includes the time during which the machine sleeps.
        stopped: returns ``True`` once long work should end early.
    """

    def __init__(
        self,
        record: SharedRecord,
        lease: Lease,
        quota: Quota,
        evictions: PendingEvictions,
        usage_log: UsageLog,
        files: AccountFiles,
        objects: ObjectFiles,
        options: AccountOptions,
        clock: Callable[[], float],
        log: TierLogger,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._record = record
        self._lease = lease
        self._quota = quota
        self._evictions = evictions
        self._usage_log = usage_log
        self._files = files
        self._log = log
        self._objects = objects
        self._options = options
        self._clock = clock
        self._stopped = stopped
        self._unreferenced = UnreferencedFiles(files, clock, options.lease_seconds, log)
        self._seen_leases: dict[str, tuple[bytes | None, float]] = {}  # the content, and the time it was first seen

    @property
    def is_housekeeper(self) -> bool:
        """``True`` if this process is the housekeeper, as far as it knows."""
        return bool(self._lease.member_id) and self._record.state.housekeeper == self._lease.member_id

    @property
    def eviction_needed(self) -> bool:
        """``True`` if more objects must be evicted, as far as this process knows."""
        return self._excess_bytes(self._record.state) > 0

    def step(self) -> None:
        """Do the work that is due. Call it several times per lease and per grace.

        Raises:
            OSError: the medium failed, or is full. The next call continues.
        """
        try:
            self._do_due_work()
        except OSError as error:
            if means_full(error):
                self._make_room()
            raise

    def _do_due_work(self) -> None:
        self._lease.renew()
        self._evictions.withdraw_in_use()
        self._usage_log.flush_if_due()
        self._quota.settle_if_idle(eviction_needed=self.eviction_needed)
        self._evictions.delete_due(of_dead_members=self.is_housekeeper)
        if self.is_housekeeper:
            self._serve_all_members()
        else:
            self._usage_log.drop_merged()
            self._watch_housekeeper()

    def count_new_account(self) -> bool:
        """Count the objects for a new account, if they fit in one page.

        Returns:
            ``True`` if the account is counted.
        """
        if not self._record.state.counted and self.is_housekeeper:
            self._scan(max_pages=1)
        return self._record.state.counted

    def _serve_all_members(self) -> None:
        state = self._record.state
        for member_id in list(state.members):
            is_other = member_id != self._lease.member_id
            if is_other and not state.members[member_id].expired and self._lease_has_expired(member_id):
                self._mark_expired(member_id)
        self._seen_leases = {name: seen for name, seen in self._seen_leases.items() if name in state.members}
        state = self._record.state
        if (
            not state.is_usable
            or self._evictions.recount_due
            or any(member.expired for member in state.members.values())
            or self._excess_bytes(state) > 0
        ):
            self._scan()
        self._unreferenced.remove_old(self._record.state)
        self._usage_log.merge_if_due()

    def _watch_housekeeper(self) -> None:
        housekeeper = self._record.state.housekeeper
        if housekeeper in self._record.state.members and not self._lease_has_expired(housekeeper):
            return

        def edit(state: AccountState) -> AccountState | None:
            if state.housekeeper != housekeeper or self._lease.member_id not in state.members:
                return None
            return state.model_copy(update={"housekeeper": self._lease.member_id})

        if self._record.change(edit).housekeeper == self._lease.member_id:
            self._log.info("this process is now the account's housekeeper; it replaces %s", housekeeper or "no process")

    def _lease_has_expired(self, member_id: str) -> bool:
        """Return whether this process, by its own clock, has seen a lease file unchanged for a whole lease."""
        try:
            content = self._files.read(lease_file(member_id), MAX_FILE_BYTES)
        except ForeignFileError:  # it cannot be renewed, so it expires
            content = None
        now = self._clock()
        seen = self._seen_leases.get(member_id)
        if seen is None or seen[0] != content:
            self._seen_leases[member_id] = (content, now)
            return False
        return now - seen[1] >= self._options.lease_seconds

    def _mark_expired(self, member_id: str) -> None:
        def edit(state: AccountState) -> AccountState | None:
            found = state.members.get(member_id)
            if found is None or found.expired:
                return None
            expired = found.model_copy(update={"expired": True})
            return state.model_copy(update={"members": {**state.members, member_id: expired}})

        self._record.change(edit)
        self._log.info(
            "the lease of process %s has expired; its reservations are released after the objects are counted",
            member_id,
        )

    def _excess_bytes(self, state: AccountState) -> int:
        """Return the bytes of objects that must be evicted and are not yet pending."""
        capacity, occupied = self._options.capacity_bytes, state.occupied_bytes
        excess = 0
        if occupied - state.pending_eviction_bytes > self._options.high_watermark * capacity:
            excess = occupied - int(self._options.low_watermark * capacity)
        excess = max(excess, state.missing_bytes(capacity))
        return max(0, excess - state.pending_eviction_bytes)

    def _scan(self, max_pages: int | None = None) -> None:
        """Count all objects, correct the account, remove expired members, and evict objects in their order."""
        before = self._record.refresh()
        expired = [name for name, member in before.members.items() if member.expired]
        excess = self._excess_bytes(before) if before.counted else 0
        victims = _NextVictims(excess)
        excluded: set[ObjectKey] = set()
        if excess:
            excluded = self._evictions.keys(before) | self._evictions.pinned | self._evictions.refusals.keys
        if excess:
            self._usage_log.flush()  # else this process's latest entries would not count
        uses = self._usage_log.merge() if excess else {}
        found_in_log: set[ObjectKey] = set()
        total = self._objects.unfinished_bytes()
        for number, page in enumerate(self._objects.pages(self._lease.renew_meanwhile)):
            if self._stopped() or number == max_pages:
                return
            self._lease.renew_if_due()
            for found in page:
                total += found.nbytes
                used = uses.get(found.key, 0.0)
                if used:
                    found_in_log.add(found.key)
                if excess and found.key not in excluded:
                    victims.offer(recency(used, found.stored_at_seconds), found.key, found.nbytes)
        state = self._record.change(lambda state: _corrected(state, before, total, expired))
        if not state.is_deleting:
            self._evictions.recount_due = False
            for member_id in expired:
                self._files.delete([lease_file(member_id)])
        if excess:
            self._usage_log.keep_only(found_in_log)
            # The account may have been wrong. Only the counted bytes decide.
            self._evict(victims.chosen(min(excess, self._excess_bytes(self._record.state))))

    def _evict(self, victims: dict[ObjectKey, int]) -> None:
        keys = list(victims)
        for start in range(0, max(1, len(keys)), _BATCH_KEYS):
            batch = {key: victims[key] for key in keys[start : start + _BATCH_KEYS]}
            if batch:
                self._evictions.add(batch, lambda _: {"rejected_bytes": 0})
            else:
                self._record.change(lambda state: state.model_copy(update={"rejected_bytes": 0}))
        self._evictions.delete_due(of_dead_members=False)

    def _make_room(self) -> None:
        """Remove some objects that have to be evicted, without a grace: a full medium has no room to record them."""
        state = self._record.refresh()
        staying = self._evictions.pinned | self._evictions.refusals.keys
        leaving = [key for key in self._evictions.keys(state) if key not in staying][:_ROOM_KEYS]
        excess = min(self._excess_bytes(state), _ROOM_BYTES)
        if not leaving and excess:
            victims = _NextVictims(excess)
            for page in self._objects.pages(self._lease.renew_meanwhile):
                for found in page:
                    if found.key not in staying:
                        victims.offer(recency(0.0, found.stored_at_seconds), found.key, found.nbytes)
            leaving = list(victims.chosen(excess))
        if leaving:
            self._evictions.recount_due = True
            self._evictions.remove(leaving)


class _NextVictims:
    """The next objects in the order of eviction, as many as have ``excess_bytes`` together."""

    def __init__(self, excess_bytes: int) -> None:
        self._excess_bytes = excess_bytes
        self._total_bytes = 0
        self._heap: list[tuple[tuple[int, float], ObjectKey, int]] = []  # the last to evict first

    def offer(self, recency: Recency, key: ObjectKey, nbytes: int) -> None:
        """Take the object if it is evicted before another one, and drop objects that are not needed."""
        rank = (-recency.kept, -recency.used_seconds)
        if self._total_bytes >= self._excess_bytes and rank <= self._heap[0][0]:
            return
        heapq.heappush(self._heap, (rank, key, nbytes))
        self._total_bytes += nbytes
        while self._heap and self._total_bytes - self._heap[0][2] >= self._excess_bytes:
            self._total_bytes -= heapq.heappop(self._heap)[2]

    def chosen(self, excess_bytes: int) -> dict[ObjectKey, int]:
        """Return objects that have ``excess_bytes`` together, and their bytes, the next to evict first."""
        chosen: dict[ObjectKey, int] = {}
        for _, key, nbytes in sorted(self._heap, reverse=True):
            if excess_bytes <= 0:
                break
            chosen[key] = nbytes
            excess_bytes -= nbytes
        return chosen


def _corrected(state: AccountState, before: AccountState, total: int, expired: list[str]) -> AccountState | None:
    """Return ``state`` after a scan.

    Two upper limits hold for the used bytes:

    - The bytes found by the scan, plus the bytes written meanwhile. Written bytes move from a quota to the objects, or
      are still in a quota.
    - The bytes in the account, plus the whole quotas of expired members: they may have written all of it.

    The smaller one is right, with one exception. If the scan found more than the account can explain, objects came from
    elsewhere, and the first limit is right.

    Nothing is corrected while objects are being deleted. The scan may have missed an object that is gone, whose bytes
    would then be subtracted a second time. Nor is a new account counted by a scan during which objects were deleted,
    since it may have found them.

    Args:
        before: the state when the scan began.
        total: the bytes found by the scan.
        expired: the members that the scan removes.
    """
    if state.counted != before.counted or state.written_bytes < before.written_bytes:
        return None  # another account has replaced this one
    if state.is_deleting or (not state.counted and state.removed_bytes != before.removed_bytes):
        return None
    at_most = total + state.written_bytes - before.written_bytes
    expired_quota_bytes = sum(member.quota_bytes for name, member in state.members.items() if name in expired)
    explained = state.occupied_bytes + state.removed_bytes - before.removed_bytes
    is_explained = state.counted and total <= explained
    used = min(at_most, state.used_bytes + expired_quota_bytes) if is_explained else at_most
    if state.counted and not expired and used == state.used_bytes:
        return None
    members = {name: member for name, member in state.members.items() if name not in expired}
    return state.model_copy(update={"counted": True, "used_bytes": used, "members": members})
