"""One object on its way to tiers: who still decides on it, who still holds it, and when its memory is given back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from offload_core.api.keys import ObjectKey
from offload_core.memory.staging_shares import TierShare
from offload_core.memory.staging_size import lease_bytes
from offload_core.tiers.staged_object import StagedObject
from offload_core.transfer.store_queue import Place, StoreBatch


@dataclass(frozen=True)
class StoreResult:
    """Whether an object is on at least one tier now."""

    key: ObjectKey
    stored: bool


class GatheredBytes:
    """Bytes that the leases of all stores hold. Thread-safe.

    Args:
        limit_bytes: what they may hold at most.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._nbytes = 0

    def try_add(self, nbytes: int) -> bool:
        """Count a lease of ``nbytes`` bytes; ``False``, and nothing counted, at the limit."""
        with self._lock:
            if self._nbytes + lease_bytes(nbytes) > self._limit_bytes:
                return False
            self._nbytes += lease_bytes(nbytes)
            return True

    def remove(self, nbytes: int) -> None:
        """Undo :meth:`try_add`."""
        with self._lock:
            self._nbytes -= lease_bytes(nbytes)


class OpenStore:
    """One object on its way to one or more tiers, each of which is charged for it as long as it holds it.

    A tier *decides* once whether it has the object, at its deadline at the latest; it *lets go* of the object when none
    of its calls uses the memory (invariant I3). Not thread-safe: for use under the one lock that guards all stores.

    Args:
        age: smaller for what is older.
        promotion: whether it was loaded from another tier; nobody waits for its result.
        report: gets the result: as soon as one tier has the object, or when all have decided that they have not.
        released: called when the memory was given back.
    """

    def __init__(
        self,
        age: int,
        staged: StagedObject,
        gathered: GatheredBytes,
        *,
        promotion: bool,
        report: Callable[[StoreResult], None],
        released: Callable[[], None],
    ) -> None:
        self.age = age
        self.staged = staged
        self.key = staged.key
        self.nbytes = staged.lease.nbytes
        self.promotion = promotion
        self._gathered = gathered
        self._report = None if promotion else report
        self._released = released
        self._undecided: set[str] = set()
        self._holders: dict[str, tuple[TierShare, StoreBatch[OpenStore]]] = {}

    @property
    def only_waits(self) -> bool:
        """Whether nothing uses its memory, so that dropping it wherever it waits gives the memory back."""
        return all(batch.place is Place.WAITING for _, batch in self._holders.values())

    @property
    def holders(self) -> dict[str, StoreBatch[OpenStore]]:
        """Per name of a tier that holds it, its batch there."""
        return {tier: batch for tier, (_, batch) in self._holders.items()}

    def give_to(self, tier: str, share: TierShare, batch: StoreBatch[OpenStore]) -> None:
        """Let ``tier``, whose ``share`` is charged for the object, hold it as a part of ``batch``."""
        self._undecided.add(tier)
        self._holders[tier] = (share, batch)

    def decide(self, tier: str, stored: bool) -> None:
        """Note whether ``tier`` has the object. A tier that has stored it after its deadline may say so again."""
        self._undecided.discard(tier)
        if self._report is not None and (stored or not self._undecided):
            self._report(StoreResult(self.key, stored))
            self._report = None

    def let_go(self, tier: str) -> None:
        """Note that ``tier`` has decided and does not use the memory any more; to be called once for each."""
        share, _ = self._holders.pop(tier)
        share.end_store(self.nbytes)
        if not self._holders:
            self._gathered.remove(self.nbytes)
            self.staged.lease.release()
            self._released()
