"""A query to a tier whose lookups cost a round trip each: few rounds, few questions, and an answer that is a hint.

- The depth of packs of full attention is found by :mod:`offload_core.planning.depth_search`: a chunk that is present
  speaks for those before it.
- One rank's objects speak for those of the other ranks.
- Objects that this process has stored, loaded or found there are not asked about again.

The load finds out if the answer was too deep. It is then a failed or a partly used load, and its objects are forgotten.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from offload_core.api.keys import ObjectKey
from offload_core.lookup.known_objects import KnownObjects
from offload_core.lookup.prefix_query import PrefixAnswer, PrefixQuery
from offload_core.planning.chunk_keys import ChunkRef
from offload_core.planning.depth_search import DepthSearch, depth_search, questions
from offload_core.planning.packs import Pack
from offload_core.planning.planner import HybridOffloadPlanner, PrefixDepth, UnitRange
from offload_core.tiers.tier import Tier

MAX_QUESTIONS = 64
"""Objects that a query asks about, for prompts of any length, any number of ranks and one pack of full attention."""
_QUESTIONS_ABOUT_DEPTH = 48
_UNITS_IN_ONE_ROUND = 16
_MAX_ROUNDS = 8
_FIRST_BATCH_UNITS = 4


async def query_in_rounds(
    tier: Tier, planner: HybridOffloadPlanner, query: PrefixQuery, known: KnownObjects, deadline: float
) -> PrefixAnswer | None:
    """Return the deepest boundary that the tier seems to have, or ``None`` if it did not answer, or not in time.

    Args:
        deadline: by the monotonic clock. No question is sent after it.
    """
    return await _Query(tier, planner, query, known, deadline).answer()


class _Query:
    def __init__(
        self, tier: Tier, planner: HybridOffloadPlanner, query: PrefixQuery, known: KnownObjects, deadline: float
    ) -> None:
        self._tier = tier
        self._planner = planner
        self._query = query
        self._known = known
        self._deadline = deadline
        self._left = MAX_QUESTIONS
        self._missing: list[ChunkRef] = []
        self._excluded = {ref for name, ref in query.excluded if name == tier.name}
        self._attention_packs = {pack.name for pack in planner.packs if pack.policy.kind == "full"}

    async def answer(self) -> PrefixAnswer | None:
        limit = await self._depth()
        if limit is None:
            return None
        query = self._query
        search = self._planner.search(
            query.computed_tokens, limit, _FIRST_BATCH_UNITS, query.local_attention_tokens, query.limit_tokens
        )
        try:
            ranges = next(search)
            while True:
                present = await self._present(ranges)
                if present is None:
                    return None
                ranges = search.send(present)
        except StopIteration as end:
            depth: PrefixDepth = end.value
            return PrefixAnswer(depth.usable_tokens, depth.attention_tokens, tuple(self._missing))

    async def _depth(self) -> int | None:
        """Return the tokens up to which all chunks of full attention seem to be present; ``None`` after the deadline.

        A model without full attention is searched by its windows.
        """
        packs = [pack for pack in self._planner.packs if pack.policy.kind == "full"]
        packs = packs or [pack for pack in self._planner.packs if pack.policy.window_tokens > 1]
        spans = {pack.name: self._units_to_search(pack) for pack in packs}
        rounds = 1 if max(map(len, spans.values()), default=0) <= _UNITS_IN_ONE_ROUND else 2
        while rounds < _MAX_ROUNDS and sum(questions(len(u), rounds) for u in spans.values()) > _QUESTIONS_ABOUT_DEPTH:
            rounds += 1
        limit = self._query.limit_tokens
        searches = [
            (pack, depth_search(units.start, units.stop, rounds, needs_all=pack.policy.kind == "full"))
            for pack, units in zip(packs, spans.values(), strict=True)
        ]
        flags: dict[str, list[bool] | None] = dict.fromkeys(spans)  # a search begins with None
        while searches:
            asked: list[tuple[Pack, DepthSearch, list[int]]] = []
            for pack, search in searches:
                try:
                    asked.append((pack, search, search.send(flags[pack.name])))
                except StopIteration as end:
                    limit = min(limit, pack.tokens_in(end.value))
            answers = await self._ask([(pack, unit) for pack, _, units in asked for unit in units])
            if answers is None:
                return None
            left = iter(answers)
            flags = {pack.name: [next(left) for _ in units] for pack, _, units in asked}
            searches = [(pack, search) for pack, search, _ in asked]
        return limit

    def _units_to_search(self, pack: Pack) -> range:
        """Return the units of a pack between the deepest known one and the first that must not be loaded."""
        first = max(self._query.computed_tokens, self._query.local_attention_tokens) // pack.unit_tokens
        end = pack.units_in(self._planner.storable_prefix(self._query.limit_tokens))
        if self._excluded and pack.policy.kind == "full":
            excluded = next((unit for unit in range(first, end) if self._ref(pack, unit) in self._excluded), None)
            if excluded is not None:
                self._missing.append(self._ref(pack, excluded))
                end = excluded
        known = next((unit for unit in reversed(range(first, end)) if self._key(pack, unit) in self._known), first - 1)
        return range(known + 1, max(end, known + 1))

    async def _present(self, parts: Sequence[UnitRange]) -> list[list[bool]] | None:
        """Return the presence of units, one list per part; ``None`` after the deadline.

        Units of full attention are present, because the search ends where they do. Below local attention, the other
        units of a boundary speak for them. Units beyond the allowed number of questions count as missing, the lowest
        ones first.
        """
        present: dict[tuple[Pack, int], bool] = {}
        unknown: list[tuple[Pack, int]] = []
        for place in ((part.pack, unit) for part in parts for unit in part.units):
            if self._excluded and self._ref(*place) in self._excluded:
                self._missing.append(self._ref(*place))
            elif place[0].name in self._attention_packs or self._key(*place) in self._known:
                present[place] = True
            else:
                unknown.append(place)
        unknown.sort(key=lambda place: -place[0].tokens_in(place[1] + 1))
        asked = unknown[: self._left]
        answers = await self._ask(asked)
        if answers is None:
            return None
        present.update(zip(asked, answers, strict=True))
        return [[present.get((part.pack, unit), False) for unit in part.units] for part in parts]

    async def _ask(self, places: Sequence[tuple[Pack, int]]) -> list[bool] | None:
        """Ask the tier for units of the first rank; ``None`` after the deadline, or if the tier has no answer."""
        seconds = self._deadline - time.monotonic()
        if not places:
            return []
        if seconds <= 0:
            return None
        self._left = max(0, self._left - len(places))
        keys = [self._key(pack, unit) for pack, unit in places]
        flags = await self._tier.ask(keys, seconds)
        if flags is None:
            return None
        self._known.add(key for key, present in zip(keys, flags, strict=True) if present)
        self._known.discard(key for key, present in zip(keys, flags, strict=True) if not present)
        self._missing += (
            self._ref(pack, unit) for (pack, unit), present in zip(places, flags, strict=True) if not present
        )
        return flags

    def _ref(self, pack: Pack, unit: int) -> ChunkRef:
        return ChunkRef(pack.name, self._query.hashes[pack.name][unit], self._query.adapter)

    def _key(self, pack: Pack, unit: int) -> ObjectKey:
        return ObjectKey(self._query.namespaces[0], pack.name, self._query.hashes[pack.name][unit])
