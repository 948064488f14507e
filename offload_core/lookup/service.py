"""Asynchronous lookups with deadlines, for the scheduler half: how deep a prefix does each tier hold?

Local media are asked about every object that can decide the answer; :mod:`.query_in_rounds` asks remote ones for hints.

The tier whose load has the highest worth (:mod:`.load_choice`) serves it. A request waits until some tier has a prefix
to load. Then it waits for a short grace period, while another tier could still do better.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from itertools import accumulate

from offload_core.api.keys import ObjectKey
from offload_core.lookup.known_objects import KnownObjects
from offload_core.lookup.load_choice import LoadChoice
from offload_core.lookup.prefix_query import PrefixAnswer, PrefixQuery, TierAnswer
from offload_core.lookup.query_in_rounds import query_in_rounds
from offload_core.lookup.tier_index import TierIndex
from offload_core.planning.chunk_keys import ChunkRef, object_keys
from offload_core.planning.planner import HybridOffloadPlanner, PrefixDepth, UnitRange
from offload_core.runtime.io_loop import IoLoop, log_unexpected
from offload_core.runtime.metrics import Counters
from offload_core.tiers.tier import Tier


class Lookup:
    """One query to all tiers. For the thread that started it.

    Args:
        reachable_tokens: the deepest boundary that any tier could answer.
        grace_seconds: longest wait for other tiers after one has a prefix to load.
        started: time of the query, by the monotonic clock.
        choice: the worth of a load.
        all_asked: whether every tier was asked.
    """

    def __init__(
        self,
        query: PrefixQuery,
        answers: Sequence[TierAnswer],
        reachable_tokens: int,
        grace_seconds: float,
        started: float,
        choice: LoadChoice,
        *,
        all_asked: bool,
    ) -> None:
        self.query = query
        self.started = started
        self._answers = tuple(answers)
        self._reachable_tokens = reachable_tokens
        self._grace_seconds = grace_seconds
        self._choice = choice
        self._all_asked = all_asked

    def done(self) -> bool:
        """Return whether the lookup has its result. One of these conditions is enough:

        - every tier has answered or is past its deadline;
        - some tier has a prefix to load, and no tier that may still answer could do better;
        - the grace period after the first prefix to load is over.
        """
        now = time.monotonic()
        still_open = [tier for tier in self._answers if tier.is_open(now)]
        if not still_open:
            return True
        best, first_hit = 0.0, now
        for tier in self._answers:
            worth = self._worth(tier)
            if worth > 0:
                best = max(best, worth)
                first_hit = min(first_hit, tier.answered_at or now)
        if best == 0:
            return False
        could_be = (self._choice.worth(tier.name, self.query, self._reachable_tokens) for tier in still_open)
        return now >= first_hit + self._grace_seconds or all(worth <= best for worth in could_be)

    def has_ended(self) -> bool:
        """Return whether every tier has answered or is past its deadline."""
        now = time.monotonic()
        return not any(tier.is_open(now) for tier in self._answers)

    def best(self) -> tuple[str, int]:
        """Return the tier whose load has the highest worth, the first of equals, and the boundary to load to.

        A tier without an answer has no match. If no tier has a match that pays, the boundary is the computed prefix.
        """
        best = max(self._answers, key=self._worth)
        if self._worth(best) <= 0:
            return best.name, self.query.computed_tokens
        return best.name, self._choice.boundary(best.name, self.query, self._boundary(best))

    def deepest(self) -> tuple[str, int]:
        """Return the tier with the deepest match and its boundary, whether a load pays or not."""
        deepest = max(self._answers, key=self._boundary)
        return deepest.name, self._boundary(deepest)

    def seconds(self) -> dict[str, tuple[float, bool]]:
        """Return, per tier, the seconds until its answer, or until now, and whether it has answered."""
        now = time.monotonic()
        return {
            tier.name: ((tier.answered_at or now) - self.started, tier.answered_at is not None)
            for tier in self._answers
        }

    def attention_tokens(self) -> int:
        """Return the deepest boundary at which some tier has all packs of full attention, as far as is known now."""
        return max((answer.attention_tokens for answer in self.answers().values()), default=0)

    def missing(self) -> set[ChunkRef]:
        """Return the chunks of the query that no tier has.

        A tier whose lookup failed, or that has no answer at its deadline, is left out. While some tier may still
        answer, or was not asked, no chunk is missing, since that tier may have it.
        """
        now = time.monotonic()
        answers = [answer for tier in self._answers if (answer := tier.get()) is not None]
        if not answers or not self._all_asked or any(tier.is_open(now) for tier in self._answers):
            return set()
        return set.intersection(*(set(answer.missing) for answer in answers))

    def answers(self) -> dict[str, PrefixAnswer]:
        """Return the answers until now, per tier."""
        return {tier.name: answer for tier in self._answers if (answer := tier.get()) is not None}

    def _boundary(self, tier: TierAnswer) -> int:
        answer = tier.get()
        return self.query.computed_tokens if answer is None else answer.boundary_tokens

    def _worth(self, tier: TierAnswer) -> float:
        return self._choice.worth(tier.name, self.query, self._boundary(tier))


class LookupService:
    """Starts lookups on the I/O loop, and lets an idle engine wait briefly for an answer.

    Args:
        grace_seconds: see :class:`Lookup`.
        indexes: index per tier name, for tiers whose medium this process cannot see.
        unavailable: names of tiers that serve no loads for now; read at the start of each lookup.
        choice: the worth of a load. By default the matched tokens times ``load_weight``.
    """

    def __init__(
        self,
        io: IoLoop,
        tiers: Sequence[Tier],
        planner: HybridOffloadPlanner,
        counters: Counters,
        indexes: Mapping[str, TierIndex] | None = None,
        grace_seconds: float = 0.0,
        unavailable: Collection[str] = (),
        choice: LoadChoice | None = None,
    ) -> None:
        self._io = io
        self._tiers = tuple(tiers)
        self._indexes = indexes or {}
        self._planner = planner
        self._grace_seconds = grace_seconds
        self._counters = counters
        self._unavailable = unavailable
        self._choice = choice or LoadChoice("always", planner, tiers, planner.max_model_len)
        self._known = {tier.name: KnownObjects() for tier in tiers if _asks_in_rounds(tier)}
        self._answered = threading.Event()

    def start(
        self, query: PrefixQuery, max_wait_seconds: float = math.inf, names: Collection[str] | None = None
    ) -> Lookup:
        """Query the tiers. Those that are not available give no answer, at once.

        Args:
            names: the tiers to query; by default all.
            max_wait_seconds: longest wait of the caller, if shorter than the tiers' deadlines. An answer after it does
                not count as a timeout of the tier.
        """
        started = time.monotonic()
        answers = []
        for tier in self._tiers:
            if names is not None and tier.name not in names:
                continue
            timeout_seconds = tier.limits.lookup_timeout_seconds
            answer = self._answer(tier, query, started + timeout_seconds)
            wanted_until = started + min(timeout_seconds, max_wait_seconds)
            answers.append(TierAnswer(tier.name, answer, wanted_until))
            answer.add_done_callback(log_unexpected)
            answer.add_done_callback(lambda _: self._answered.set())
        reachable_tokens = self._planner.reachable_prefix(query.limit_tokens)
        all_asked = len(answers) == len(self._tiers)
        choice = self._choice
        return Lookup(query, answers, reachable_tokens, self._grace_seconds, started, choice, all_asked=all_asked)

    def wait_for_answer(self, seconds: float) -> None:
        """Wait until some tier answers, at most ``seconds``. For a step in which the engine has no other work."""
        self._answered.wait(seconds)
        self._answered.clear()

    def learn(self, tier: str, keys: Iterable[ObjectKey]) -> None:
        """Remember objects of the first rank that were loaded from a tier."""
        if (known := self._known.get(tier)) is not None:
            known.add(keys)

    def learn_stored(self, keys: Iterable[ObjectKey]) -> None:
        """Remember objects of the first rank that some tier has stored. Of several tiers, nobody knows which one."""
        if len(self._tiers) == 1:
            self.learn(self._tiers[0].name, keys)

    def doubt(self, tier: str, keys: Iterable[ObjectKey]) -> None:
        """Forget objects of the first rank, because a load from the tier did not get all of them."""
        if (known := self._known.get(tier)) is not None:
            known.discard(keys)

    def _answer(self, tier: Tier, query: PrefixQuery, deadline: float) -> Future[PrefixAnswer | None]:
        answered: Future[PrefixAnswer | None] = Future()
        index = self._indexes.get(tier.name)
        if tier.name in self._unavailable:
            self._counters.add("breaker_refused", tier.name)
            answered.set_result(None)
        elif index is not None:
            answered.set_result(self._query_index(tier, index, query))
        elif not tier.health.admits("lookup"):
            answered.set_result(None)
        else:
            return self._io.submit(self._query_tier(tier, query, deadline))
        return answered

    def _query_index(self, tier: Tier, index: TierIndex, query: PrefixQuery) -> PrefixAnswer:
        """Answer from the index, on the caller's thread."""
        search = _prefix_search(self._planner, query, tier.name)
        looked_up = hits = 0
        try:
            ranges = next(search)
            while True:
                present = [index.present(query.namespaces, part.pack.name, _hashes(query, part)) for part in ranges]
                looked_up += sum(map(len, present))
                hits += sum(flags.count(True) for flags in present)
                ranges = search.send(present)
        except StopIteration as end:
            ranks = len(query.namespaces)
            self._counters.add("lookup_hits", tier.name, hits * ranks)
            self._counters.add("lookup_misses", tier.name, (looked_up - hits) * ranks)
            answer: PrefixAnswer = end.value
            return answer

    async def _query_tier(self, tier: Tier, query: PrefixQuery, deadline: float) -> PrefixAnswer | None:
        """Answer by lookups on the medium, none of them after the deadline. A cancelled query leaves no state."""
        if (known := self._known.get(tier.name)) is not None:
            return await query_in_rounds(tier, self._planner, query, known, deadline)
        search = _prefix_search(self._planner, query, tier.name)
        try:
            ranges = next(search)
            while (seconds := deadline - time.monotonic()) > 0:
                present = await _present(tier, query, ranges, seconds)
                if present is None:
                    return None
                ranges = search.send(present)
        except StopIteration as end:
            answer: PrefixAnswer = end.value
            return answer
        return None


def _asks_in_rounds(tier: Tier) -> bool:
    """Return whether lookups cost a round trip per object, and deep objects speak for those before them.

    A medium that evicts by itself may remove the head of a prefix first. Its lookups take one request for many objects.
    """
    return tier.capabilities.medium == "remote" and not tier.capabilities.evicts


def _prefix_search(
    planner: HybridOffloadPlanner, query: PrefixQuery, tier: str
) -> Generator[Sequence[UnitRange], Sequence[Sequence[bool]], PrefixAnswer]:
    """Run the planner's search without the excluded chunks, and collect the missing ones."""
    missing: list[ChunkRef] = []
    search = planner.search(
        query.computed_tokens, query.limit_tokens, local_attention_tokens=query.local_attention_tokens
    )
    try:
        ranges = next(search)
        while True:
            present = yield ranges
            usable: list[Sequence[bool]] = []
            for part, flags in zip(ranges, present, strict=True):
                if query.excluded or False in flags:
                    refs = [ChunkRef(part.pack.name, digest, query.adapter) for digest in _hashes(query, part)]
                    allowed = ((tier, ref) not in query.excluded for ref in refs)
                    flags = [there and may_load for there, may_load in zip(flags, allowed, strict=True)]
                    missing += (ref for ref, there in zip(refs, flags, strict=True) if not there)
                usable.append(flags)
            ranges = search.send(usable)
    except StopIteration as end:
        depth: PrefixDepth = end.value
        return PrefixAnswer(depth.usable_tokens, depth.attention_tokens, tuple(missing))


def _hashes(query: PrefixQuery, part: UnitRange) -> Sequence[bytes]:
    units = part.units
    return query.hashes[part.pack.name][units.start : units.stop : units.step]


async def _present(
    tier: Tier, query: PrefixQuery, ranges: Sequence[UnitRange], seconds: float
) -> list[list[bool]] | None:
    """Look up all ranks' parts of the units.

    Returns:
        Per range, whether each unit is complete; ``None`` if the tier has no answer.
    """
    keys: list[ObjectKey] = []
    parts = [_hashes(query, part) for part in ranges]
    for namespace in query.namespaces:
        for part, hashes in zip(ranges, parts, strict=True):
            keys += object_keys(namespace, part.pack.name, hashes)
    flags = await tier.ask(keys, seconds)
    if flags is None:
        return None
    per_rank = len(keys) // len(query.namespaces)
    if per_rank < len(keys):
        flags = [all(flags[unit::per_rank]) for unit in range(per_rank)]
    ends = list(accumulate(map(len, parts)))
    return [flags[end - len(hashes) : end] for end, hashes in zip(ends, parts, strict=True)]
