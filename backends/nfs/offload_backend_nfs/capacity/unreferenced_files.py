"""Small files of killed processes that the account does not name: leases and eviction batches."""

from __future__ import annotations

from collections.abc import Callable

from offload_backend_nfs.capacity import lease, pending_evictions
from offload_backend_nfs.capacity.account_state import AccountState, is_name
from offload_backend_nfs.capacity.ports import AccountFiles
from offload_core.api import TierLogger


class UnreferencedFiles:
    """Removes files that no process will name any more. Calls block.

    A process writes such a file before it changes the account. So a file is removed only if the account has not named
    it for a whole lease. A living process can do without it: a lease is written again, and a batch is dropped.

    Args:
        clock: returns seconds, and includes the time during which the machine sleeps.
    """

    def __init__(self, files: AccountFiles, clock: Callable[[], float], lease_seconds: float, log: TierLogger) -> None:
        self._files = files
        self._log = log
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._looked_seconds = -float("inf")
        self._first_seen_seconds: dict[str, float] = {}

    def remove_old(self, state: AccountState) -> None:
        """Look for such files twice per lease, and remove the old ones.

        Raises:
            OSError: the medium failed.
        """
        now = self._clock()
        if now - self._looked_seconds < self._lease_seconds / 2:
            return
        self._looked_seconds = now
        folders = ((lease.FOLDER, state.members), (pending_evictions.FOLDER, state.pending_evictions))
        unreferenced = [
            f"{folder}/{name}"
            for folder, referenced in folders
            for name in self._files.names(folder)
            if is_name(name) and name not in referenced
        ]
        self._first_seen_seconds = {name: self._first_seen_seconds.get(name, now) for name in unreferenced}
        old = [name for name, seen in self._first_seen_seconds.items() if now - seen >= self._lease_seconds]
        if old:
            self._files.delete(old)
            self._log.info("removed %d small files of killed processes", len(old))
