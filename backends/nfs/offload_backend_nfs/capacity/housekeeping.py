"""The housekeeping of a shared prefix. One process at a time is its keeper, and counts, evicts and settles for all.

Every process looks after its own lease and claim in :meth:`Keeper.step`, and watches the keeper's lease; when that has
run out, it takes over.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable

from offload_backend_nfs.capacity.account_state import AccountState
from offload_backend_nfs.capacity.lease import OWNERS, AccountOptions, Claim
from offload_backend_nfs.capacity.pending_evictions import Condemned
from offload_backend_nfs.capacity.ports import ObjectStore, SmallObjects
from offload_backend_nfs.capacity.shared_record import Generations
from offload_backend_nfs.capacity.usage_log import Touches
from offload_core.api import ObjectKey

logger = logging.getLogger(__name__)

_BATCH_KEYS = 10_000


class Keeper:
    """This process's part of the housekeeping. Calls block, one at a time.

    Args:
        clock: seconds that pass also while the machine sleeps.
        stopped: whether to leave long work.
    """

    def __init__(
        self,
        record: Generations,
        claim: Claim,
        condemned: Condemned,
        touches: Touches,
        small: SmallObjects,
        store: ObjectStore,
        options: AccountOptions,
        clock: Callable[[], float],
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._record = record
        self._claim = claim
        self._condemned = condemned
        self._touches = touches
        self._small = small
        self._store = store
        self._options = options
        self._clock = clock
        self._stopped = stopped
        self._leases: dict[str, tuple[bytes | None, float]] = {}

    @property
    def is_keeper(self) -> bool:
        """Whether this process is the keeper, as far as it knows."""
        return bool(self._claim.owner) and self._record.state.keeper == self._claim.owner

    @property
    def pressed(self) -> bool:
        """Whether objects have to go, as far as this process knows."""
        return self._excess_bytes(self._record.state) > 0

    def step(self) -> None:
        """Do what is due. To be called several times in a lease and in a grace.

        Raises:
            OSError: the medium failed; the next call goes on.
        """
        self._claim.renew()
        self._condemned.spare()
        self._touches.write_down_if_due()
        self._claim.settle_if_idle(pressed=self.pressed)
        self._condemned.delete_due(orphans=self.is_keeper)
        if self.is_keeper:
            self._keep()
        else:
            self._touches.forget()
            self._watch_the_keeper()

    def count_a_new_account(self) -> bool:
        """Count the objects for an account that has none, if they are no more than one page.

        Returns:
            Whether the account is counted.
        """
        if not self._record.state.counted and self.is_keeper:
            self._scan(most_pages=1)
        return self._record.state.counted

    def _keep(self) -> None:
        state = self._record.state
        for owner in list(state.owners):
            if owner != self._claim.owner and not state.owners[owner].dead and self._has_run_out(owner):
                self._bury(owner)
        self._leases = {owner: seen for owner, seen in self._leases.items() if owner in state.owners}
        state = self._record.state
        if not state.counted or any(owner.dead for owner in state.owners.values()) or self._excess_bytes(state) > 0:
            self._scan()
        self._touches.merge_if_due()

    def _watch_the_keeper(self) -> None:
        keeper = self._record.state.keeper
        if keeper in self._record.state.owners and not self._has_run_out(keeper):
            return

        def edit(state: AccountState) -> AccountState | None:
            if state.keeper != keeper or self._claim.owner not in state.owners:
                return None
            return state.model_copy(update={"keeper": self._claim.owner})

        if self._record.change(edit).keeper == self._claim.owner:
            logger.info("this process is the account's keeper now, in the place of %s", keeper or "nobody")

    def _has_run_out(self, owner: str) -> bool:
        """Whether a lease was seen unchanged for its whole life, by this process's clock."""
        content = self._small.read(f"{OWNERS}/{owner}")
        now = self._clock()
        seen = self._leases.get(owner)
        if seen is None or seen[0] != content:
            self._leases[owner] = (content, now)
            return False
        return now - seen[1] >= self._options.lease_seconds

    def _bury(self, owner: str) -> None:
        def edit(state: AccountState) -> AccountState | None:
            found = state.owners.get(owner)
            if found is None or found.dead:
                return None
            dead = found.model_copy(update={"dead": True})
            return state.model_copy(update={"owners": {**state.owners, owner: dead}})

        self._record.change(edit)
        logger.info("the account's owner %s is gone; its room comes back when the objects were counted", owner)

    def _excess_bytes(self, state: AccountState) -> int:
        """Return how many bytes of objects are still to be condemned."""
        capacity, occupied = self._options.capacity_bytes, state.occupied_bytes
        excess = 0
        if occupied - state.condemned_bytes > self._options.high_watermark * capacity:
            excess = occupied - int(self._options.low_watermark * capacity)
        if 0 < state.wanted_bytes <= capacity:
            excess = max(excess, occupied + state.wanted_bytes - capacity)
        return max(0, excess - state.condemned_bytes)

    def _scan(self, most_pages: int | None = None) -> None:
        """Count all objects; correct the account, settle the dead, and condemn what was used longest ago."""
        before = self._record.refresh()
        dead = [name for name, owner in before.owners.items() if owner.dead]
        excess = self._excess_bytes(before) if before.counted else 0
        victims = _Oldest(excess)
        spared = self._condemned.keys(before) | self._condemned.pinned if excess else set()
        uses = self._touches.merge() if excess else {}
        used_still: set[ObjectKey] = set()
        total = self._store.unfinished_bytes()
        for number, page in enumerate(self._store.pages()):
            if self._stopped() or number == most_pages:
                return
            self._claim.beat()
            for found in page:
                total += found.nbytes
                if excess and found.key not in spared:
                    used = uses.get(found.key, 0.0)
                    if used:
                        used_still.add(found.key)
                    victims.offer(max(used, found.stored_at_seconds), found.key, found.nbytes)
        self._record.change(lambda state: _corrected(state, before, total, dead))
        for owner in dead:
            self._small.delete([f"{OWNERS}/{owner}"])
        if excess:
            self._touches.keep_only(used_still)
            self._condemn(victims.chosen())

    def _condemn(self, chosen: dict[ObjectKey, int]) -> None:
        keys = list(chosen)
        for start in range(0, max(1, len(keys)), _BATCH_KEYS):
            batch = {key: chosen[key] for key in keys[start : start + _BATCH_KEYS]}
            if batch:
                self._condemned.condemn(batch, lambda _: {"wanted_bytes": 0})
            else:
                self._record.change(lambda state: state.model_copy(update={"wanted_bytes": 0}))
        self._condemned.delete_due(orphans=False)


class _Oldest:
    """The objects that were used longest ago, as many as have ``excess_bytes`` together."""

    def __init__(self, excess_bytes: int) -> None:
        self._excess_bytes = excess_bytes
        self._total_bytes = 0
        self._heap: list[tuple[float, ObjectKey, int]] = []  # the latest use first

    def offer(self, used_seconds: float, key: ObjectKey, nbytes: int) -> None:
        """Take the object, if it was used longer ago than another one, which is then not needed."""
        if self._total_bytes >= self._excess_bytes and -used_seconds <= self._heap[0][0]:
            return
        heapq.heappush(self._heap, (-used_seconds, key, nbytes))
        self._total_bytes += nbytes
        while self._heap and self._total_bytes - self._heap[0][2] >= self._excess_bytes:
            self._total_bytes -= heapq.heappop(self._heap)[2]

    def chosen(self) -> dict[ObjectKey, int]:
        """Return the objects and their bytes, those used longest ago first."""
        return {key: nbytes for _, key, nbytes in sorted(self._heap, reverse=True)}


def _corrected(state: AccountState, before: AccountState, total: int, dead: list[str]) -> AccountState | None:
    """Return ``state`` after a scan that has found ``total`` bytes and began at ``before``.

    There can be no more than what was found, and what was written meanwhile: it moves from a claim to the objects, or
    is a claim still. Nor can there be more than the account says, if the dead have written all that they had claimed.
    The smaller one is right, unless more was found than the account can explain: something has come from elsewhere.
    """
    if state.counted != before.counted or state.written_bytes < before.written_bytes:
        return None  # another account has taken this one's place
    at_most = total + state.written_bytes - before.written_bytes
    buried = sum(owner.claim_bytes for name, owner in state.owners.items() if name in dead)
    explained = state.occupied_bytes + state.removed_bytes - before.removed_bytes
    used = min(at_most, state.used_bytes + buried) if state.counted and total <= explained else at_most
    if state.counted and not dead and used == state.used_bytes:
        return None
    owners = {name: owner for name, owner in state.owners.items() if name not in dead}
    return state.model_copy(update={"counted": True, "used_bytes": used, "owners": owners})
