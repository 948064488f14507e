"""The lease by which a process takes part in the shared account.

A process that takes part is a *member* of the account. Each member keeps a lease: a small file of its own. The member
rewrites that file before the lease expires.

No clocks are compared between hosts. Each process measures, by its own clock, the time for which it has seen a lease
file unchanged. A member that could not renew its lease for half of ``lease_seconds`` starts no more writes. So its
writes have ended before other processes take it for dead, if no single write takes longer than half a lease.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Any

from offload_backend_nfs.capacity.account_options import AccountOptions
from offload_backend_nfs.capacity.account_state import AccountState, Member, new_name
from offload_backend_nfs.capacity.ports import AccountFiles
from offload_backend_nfs.capacity.shared_record import SharedRecord
from offload_core.api import TierLogger

FOLDER = "owners"  # part of the format on the medium
MAX_FILE_BYTES = 64
"""The most bytes of a lease file. It needs no checksum: only a change of its content counts."""
_RENEWALS_PER_LEASE = 8


def lease_file(member_id: str) -> str:
    """Return the name of a member's lease file."""
    return f"{FOLDER}/{member_id}"


class Lease:
    """This process as a member of the account. Calls block, and may come from any thread.

    Args:
        clock: returns seconds, and includes the time during which the machine sleeps.
    """

    def __init__(
        self,
        record: SharedRecord,
        files: AccountFiles,
        options: AccountOptions,
        clock: Callable[[], float],
        log: TierLogger,
    ) -> None:
        self._record = record
        self._files = files
        self._log = log
        self._options = options
        self._clock = clock
        self.member_id = ""
        """This process's name in the record, or empty. A process that was taken for dead joins with a new name."""
        self.lock = threading.Lock()
        """Held while the name, or numbers that belong to it, change. Never held while waiting for the medium."""
        self.on_reset: list[Callable[[], None]] = []
        """Called with :attr:`lock` held when this process joins: numbers that belong to the old name are void."""
        self._renewed_seconds = -float("inf")
        self._next_try_seconds = -float("inf")
        self._renewals = 0
        # A change of the record takes long while other processes are faster.
        record.listeners.append(lambda _: self.renew_meanwhile())

    @property
    def allows_writes(self) -> bool:
        """``True`` if this process is a member and has renewed its lease within half of ``lease_seconds``."""
        return bool(self.member_id) and self._clock() - self._renewed_seconds < self._options.lease_seconds / 2

    def join(self) -> None:
        """Become a member with an empty quota, and the housekeeper if there is none.

        Raises:
            OSError: the medium failed, or cannot be written.
        """
        with self._record.lock:
            with self.lock:
                for reset in self.on_reset:
                    reset()
                self.member_id = ""
            member_id, started, self._renewals = new_name(), self._clock(), 0
            self._files.create(lease_file(member_id), b"0")
            if self._files.create(lease_file(member_id), b"0"):
                raise OSError(
                    errno.EOPNOTSUPP,
                    "this storage creates a file although it exists, so processes cannot keep a capacity together; "
                    "use a server that supports conditional writes (S3's If-None-Match), or remove the capacity",
                )

            def edit(state: AccountState) -> AccountState:
                housekeeper = state.housekeeper if state.housekeeper in state.members else member_id
                members = {**state.members, member_id: Member()}
                return state.model_copy(update={"members": members, "housekeeper": housekeeper})

            self._record.change(edit)
            self.member_id, self._renewed_seconds = member_id, started

    def leave(self, settlement: Callable[[AccountState], dict[str, Any]]) -> None:
        """Stop being a member. Idempotent.

        Args:
            settlement: returns the other fields that the same change sets.

        Raises:
            OSError: the medium failed. Other processes will take this process for dead.
        """
        with self._record.lock:
            member_id = self.member_id
            if not member_id:
                return
            self.member_id = ""

            def edit(state: AccountState) -> AccountState | None:
                if not state.has_live(member_id):
                    return None
                members = {name: member for name, member in state.members.items() if name != member_id}
                housekeeper = "" if state.housekeeper == member_id else state.housekeeper
                return state.model_copy(update={"members": members, "housekeeper": housekeeper, **settlement(state)})

            self._record.change(edit)
            self._files.delete([lease_file(member_id)])

    def renew(self) -> None:
        """Renew the lease and read the newest state. If this process was taken for dead, it joins again.

        Raises:
            OSError: the medium failed, or cannot be written.
        """
        with self._record.lock:
            if self.member_id:
                self.renew_if_due()
                if self._record.refresh().has_live(self.member_id):
                    return
                self._log.warning(
                    "the lease of this process has expired: it was not renewed within %g s, or the account was "
                    "replaced; it joins again, but its reservations are lost, and the next scan counts its objects",
                    self._options.lease_seconds,
                )
            self.join()

    def renew_if_due(self) -> None:
        """Renew the lease, unless it was renewed a moment ago or this process is no member."""
        started = self._clock()
        due_seconds = self._options.lease_seconds / _RENEWALS_PER_LEASE
        if self.member_id and started - self._renewed_seconds >= due_seconds:
            self._renewals += 1
            self._files.write(lease_file(self.member_id), b"%d" % self._renewals)
            self._renewed_seconds = started

    def renew_meanwhile(self) -> None:
        """Renew the lease if it is due, within other work. A failure does not end that work."""
        if self._clock() < self._next_try_seconds:
            return
        try:
            self.renew_if_due()
        except OSError:  # the next renewal elsewhere reports the error
            self._next_try_seconds = self._clock() + self._options.lease_seconds / _RENEWALS_PER_LEASE
