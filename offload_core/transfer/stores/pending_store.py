"""One object on its way to tiers: undecided tiers, tiers that hold its memory, and the release of that memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offload_core.api.keys import ObjectKey
from offload_core.memory.byte_budget import ByteBudget
from offload_core.memory.staging_shares import TierShare
from offload_core.memory.staging_size import lease_bytes
from offload_core.tiers.staged_object import StagedObject
from offload_core.transfer.stores.store_queue import BatchState, StoreBatch


@dataclass(frozen=True)
class StoreResult:
    """True if an object is on at least one tier now."""

    key: ObjectKey
    stored: bool


class PendingStore:
    """One object on its way to one or more tiers. Each tier is charged for the object as long as it holds it.

    A tier *decides* once whether it has the object, at its deadline at the latest. It *releases* the object when none
    of its calls uses the memory (invariant I3). Not thread-safe: use it under the one lock that guards all stores.

    Args:
        age: smaller for an older object.
        budget: it gets the bytes of the lease back after their release; ``None`` for an object in lent memory.
        promotion: whether the object was loaded from another tier; nobody waits for its result.
        sealed: whether the object has its header already.
        report: receives the result, as soon as one tier has the object or every tier has decided that it has not.
        on_released: called after the release of the memory.
    """

    def __init__(
        self,
        age: int,
        staged: StagedObject,
        budget: ByteBudget | None,
        *,
        promotion: bool,
        sealed: bool,
        report: Callable[[StoreResult], None],
        on_released: Callable[[], None],
    ) -> None:
        self.age = age
        self.staged = staged
        self.key = staged.key
        self.nbytes = staged.lease.nbytes
        self.promotion = promotion
        self.sealed = sealed
        self._budget = budget
        self._report = None if promotion else report
        self._on_released = on_released
        self._undecided: set[str] = set()
        self._holders: dict[str, tuple[TierShare, StoreBatch[PendingStore]]] = {}

    @property
    def only_waits(self) -> bool:
        """True if nothing uses its memory, so that dropping it at every tier releases the memory."""
        return all(batch.state is BatchState.WAITING for _, batch in self._holders.values())

    @property
    def holds_staging(self) -> bool:
        """True if its release frees staging memory."""
        return self._budget is not None

    @property
    def holders(self) -> dict[str, StoreBatch[PendingStore]]:
        """Per name of a tier that holds it, its batch there."""
        return {tier: batch for tier, (_, batch) in self._holders.items()}

    def assign(self, tier: str, share: TierShare, batch: StoreBatch[PendingStore]) -> None:
        """Let ``tier``, whose ``share`` is charged for the object, hold it as a part of ``batch``."""
        self._undecided.add(tier)
        self._holders[tier] = (share, batch)

    def decide(self, tier: str, stored: bool) -> None:
        """Note whether ``tier`` has the object. A tier that stores it after its deadline may decide a second time."""
        self._undecided.discard(tier)
        if self._report is not None and (stored or not self._undecided):
            self._report(StoreResult(self.key, stored))
            self._report = None

    def release(self, tier: str) -> None:
        """Note that ``tier`` has decided and no longer uses the memory. Call it once for each tier."""
        share, _ = self._holders.pop(tier)
        share.discharge_store(self.nbytes)
        if not self._holders:
            if self._budget is not None:
                self._budget.give_back(lease_bytes(self.nbytes))
            self.staged.lease.release()
            self._on_released()
