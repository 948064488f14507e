"""What the scheduler half believes of chunks: stored, on their way, not to be trusted."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping

from offload_core.planning.chunk_keys import ChunkRef

_KNOWN_CHUNKS = 1 << 16
_MISTRUST_SECONDS = 60.0


class ChunkLedger:
    """Beliefs about chunks, so that nothing is copied twice and a bad hit is not offered again (invariant I5).

    A chunk is *known* once it is stored, on its way or loaded; *pending* until every rank has said how its store ended;
    *mistrusted* on a tier for a minute after a load from there did not get it, or until it is stored anew. All of it
    may be forgotten at any time: then a chunk is offered to the tiers once more, and they say that they have it.

    Args:
        num_ranks: ranks that report on each store.
        patience_seconds: how long after its start a store counts as pending.
    """

    def __init__(self, num_ranks: int, patience_seconds: float) -> None:
        self._num_ranks = num_ranks
        self._patience_seconds = patience_seconds
        self._known: OrderedDict[ChunkRef, float] = OrderedDict()  # since when it is there; zero for long enough
        self._pending: dict[ChunkRef, tuple[int, float]] = {}
        self._mistrusted: dict[tuple[str, ChunkRef], float] = {}

    def knows(self, ref: ChunkRef) -> bool:
        """Return whether ``ref`` is stored or on its way, as far as is known."""
        if ref not in self._known:
            return False
        self._known.move_to_end(ref)
        return True

    def store_begins(self, ref: ChunkRef) -> None:
        """Note that ``ref`` is on its way: known and pending."""
        self._remember(ref, 0.0)
        self._pending[ref] = (self._num_ranks, time.monotonic() + self._patience_seconds)

    def stores_ended(self, ended: Mapping[ChunkRef, int], not_stored: Collection[ChunkRef]) -> None:
        """Take reports on stores: how many ranks have ended each chunk's, and which chunks some rank did not store."""
        for ref in not_stored:
            self._known.pop(ref, None)
        anew: set[ChunkRef] = set()
        for ref, ranks in ended.items():
            left, until = self._pending.get(ref, (0, 0.0))
            if left > ranks:
                self._pending[ref] = (left - ranks, until)
                continue
            self._pending.pop(ref, None)
            if ref not in not_stored:
                anew.add(ref)
                if ref in self._known:
                    self._known[ref] = time.monotonic()

        if self._mistrusted and anew:
            self._mistrusted = {place: until for place, until in self._mistrusted.items() if place[1] not in anew}

    def loaded(self, refs: Iterable[ChunkRef]) -> None:
        """Note chunks that a load got: they are on a tier."""
        for ref in refs:
            self._remember(ref, 0.0)

    def load_failed(self, places: Collection[tuple[str, ChunkRef]]) -> None:
        """Mistrust chunks that a load did not get, on the tier of that name; other tiers may have them all the same."""
        now = time.monotonic()
        if places:
            self._mistrusted = {place: until for place, until in self._mistrusted.items() if until > now}
        for tier, ref in places:
            self._mistrusted[tier, ref] = now + _MISTRUST_SECONDS
            self._known.pop(ref, None)

    def missing(self, refs: Iterable[ChunkRef]) -> bool:
        """Forget chunks that a lookup did not find; returns whether one of them was thought to be there."""
        gone = [ref for ref in refs if ref in self._known and ref not in self._pending]
        self.forget(gone)
        return bool(gone)

    def forget(self, refs: Iterable[ChunkRef]) -> None:
        """Forget chunks, so that they are offered to the tiers again."""
        for ref in refs:
            if ref not in self._pending:
                self._known.pop(ref, None)

    def on_its_way(self, refs: Iterable[ChunkRef], since: float) -> bool:
        """Return whether one of ``refs`` has got to the tiers after ``since``, or is on its way within the patience."""
        now = time.monotonic()
        return any(
            self._pending[ref][1] > now if ref in self._pending else self._known.get(ref, 0.0) > since for ref in refs
        )

    @property
    def mistrusted(self) -> frozenset[tuple[str, ChunkRef]]:
        """Names of tiers and chunks there that are not to be trusted now."""
        if not self._mistrusted:
            return frozenset()
        now = time.monotonic()
        return frozenset(place for place, until in self._mistrusted.items() if until > now)

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()
        self._pending.clear()
        self._mistrusted.clear()

    def _remember(self, ref: ChunkRef, since: float) -> None:
        self._known[ref] = since
        self._known.move_to_end(ref)
        if len(self._known) > _KNOWN_CHUNKS:
            self._known.popitem(last=False)
