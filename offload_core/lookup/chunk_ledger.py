"""The scheduler half's beliefs about chunks: present, pending, absent, or excluded."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping

from offload_core.planning.chunk_keys import ChunkRef

_MAX_PRESENT_CHUNKS = 1 << 16
_EXCLUSION_SECONDS = 60.0


class ChunkLedger:
    """Beliefs about chunks, so that no chunk is copied twice and no bad hit is offered again (invariant I5).

    A chunk is *present* from the begin of its store, or once it was loaded. Its store is *pending* until every rank has
    reported the end. It is *absent* after a store that failed on some rank. After a load did not get a chunk from a
    tier, the chunk is *excluded* there for a minute, or until it is stored again. All beliefs may be forgotten at any
    time. Then a chunk is offered to the tiers once more, and they report that they have it.

    Args:
        num_ranks: ranks that report on each store.
        max_pending_seconds: longest time for which a store counts as pending.
    """

    def __init__(self, num_ranks: int, max_pending_seconds: float) -> None:
        self.num_ranks = num_ranks
        self._max_pending_seconds = max_pending_seconds
        self._present: OrderedDict[ChunkRef, float] = OrderedDict()  # time of the end of its store, or 0
        self._pending: dict[ChunkRef, tuple[int, float]] = {}
        self._absent: OrderedDict[ChunkRef, None] = OrderedDict()
        self._excluded: dict[tuple[str, ChunkRef], float] = {}

    def is_present(self, ref: ChunkRef) -> bool:
        """Return whether ``ref`` is believed to be stored, or its store is pending."""
        if ref not in self._present:
            return False
        self._present.move_to_end(ref)
        return True

    def is_absent(self, ref: ChunkRef) -> bool:
        """Return whether the last store of ``ref`` is known to have failed. ``False`` if nothing is known."""
        return ref in self._absent

    def is_pending(self, ref: ChunkRef) -> bool:
        """Return whether the store of ``ref`` has begun and not ended on every rank."""
        return ref in self._pending

    def pending_packs(self) -> list[str]:
        """Return the name of the pack of each chunk whose store has begun and not ended on every rank."""
        return [ref.pack for ref in self._pending]

    @property
    def has_pending(self) -> bool:
        """True if some store has begun and not ended on every rank."""
        return bool(self._pending)

    def store_started(self, ref: ChunkRef) -> None:
        """Record the begin of a store: ``ref`` is present, and its store is pending."""
        self._add_present(ref, 0.0)
        self._pending[ref] = (self.num_ranks, time.monotonic() + self._max_pending_seconds)

    def stores_ended(self, ended: Mapping[ChunkRef, int], not_stored: Collection[ChunkRef]) -> None:
        """Record the end of stores.

        Args:
            ended: per chunk, the number of ranks that have ended its store.
            not_stored: chunks that some rank did not store.
        """
        for ref in not_stored:
            self._present.pop(ref, None)
            self._absent[ref] = None
            if len(self._absent) > _MAX_PRESENT_CHUNKS:
                self._absent.popitem(last=False)
        stored_again: set[ChunkRef] = set()
        for ref, ranks in ended.items():
            left, until = self._pending.get(ref, (0, 0.0))
            if left > ranks:
                self._pending[ref] = (left - ranks, until)
                continue
            self._pending.pop(ref, None)
            if ref not in not_stored:
                stored_again.add(ref)
                if ref in self._present:
                    self._present[ref] = time.monotonic()

        if self._excluded and stored_again:
            self._excluded = {place: until for place, until in self._excluded.items() if place[1] not in stored_again}

    def loaded(self, refs: Iterable[ChunkRef]) -> None:
        """Record chunks that a load got: they are present."""
        for ref in refs:
            self._add_present(ref, 0.0)

    def load_failed(self, places: Collection[tuple[str, ChunkRef]]) -> None:
        """Exclude chunks that a load did not get from the tier of that name. Other tiers may have them all the same."""
        now = time.monotonic()
        if places:
            self._excluded = {place: until for place, until in self._excluded.items() if until > now}
        for tier, ref in places:
            self._excluded[tier, ref] = now + _EXCLUSION_SECONDS
            self._present.pop(ref, None)

    def not_found(self, refs: Iterable[ChunkRef]) -> bool:
        """Forget chunks that a lookup did not find; returns whether one of them was believed to be present."""
        gone = [ref for ref in refs if ref in self._present and ref not in self._pending]
        self.forget(gone)
        return bool(gone)

    def forget(self, refs: Iterable[ChunkRef]) -> None:
        """Forget chunks, so that they are offered to the tiers again."""
        for ref in refs:
            if ref not in self._pending:
                self._present.pop(ref, None)

    def any_arriving(self, refs: Iterable[ChunkRef], since: float) -> bool:
        """Return whether the store of one of ``refs`` has ended after ``since``, or is pending."""
        now = time.monotonic()
        return any(
            self._pending[ref][1] > now if ref in self._pending else self._present.get(ref, 0.0) > since for ref in refs
        )

    @property
    def excluded(self) -> frozenset[tuple[str, ChunkRef]]:
        """Pairs of a tier's name and a chunk that is excluded there now."""
        if not self._excluded:
            return frozenset()
        now = time.monotonic()
        return frozenset(place for place, until in self._excluded.items() if until > now)

    def clear(self) -> None:
        """Forget everything."""
        self._present.clear()
        self._pending.clear()
        self._absent.clear()
        self._excluded.clear()

    def _add_present(self, ref: ChunkRef, since: float) -> None:
        self._absent.pop(ref, None)
        self._present[ref] = since
        self._present.move_to_end(ref)
        if len(self._present) > _MAX_PRESENT_CHUNKS:
            self._present.popitem(last=False)
