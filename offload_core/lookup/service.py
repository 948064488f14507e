"""Asynchronous lookups with deadlines, for the scheduler half: how deep a prefix does each tier hold?

The tier with the highest matched tokens times ``load_weight`` is to serve the load. A request waits while no tier has
answered with something to load; then for a short grace, as long as another tier could still do better.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from concurrent.futures import Future
from itertools import accumulate

from offload_core.api.keys import ObjectKey
from offload_core.lookup.local_index import TierIndex
from offload_core.lookup.question import PrefixAnswer, PrefixQuestion, TierAnswer
from offload_core.planning.chunk_keys import ChunkRef, object_keys
from offload_core.planning.planner import HybridOffloadPlanner, UnitRange
from offload_core.runtime.io_loop import IoLoop, log_unexpected
from offload_core.runtime.metrics import Counters
from offload_core.tiers.tier import Tier


class Lookup:
    """One question to all tiers. For the thread that started it.

    Args:
        reachable_tokens: the deepest boundary that any tier could answer.
        grace_seconds: how long to wait for other tiers once one has something to load.
        started: when the tiers were asked, by the monotonic clock.
    """

    def __init__(
        self,
        question: PrefixQuestion,
        answers: Sequence[TierAnswer],
        reachable_tokens: int,
        grace_seconds: float,
        started: float,
    ) -> None:
        self.question = question
        self.started = started
        self._answers = tuple(answers)
        self._reachable_tokens = reachable_tokens
        self._grace_seconds = grace_seconds

    def done(self) -> bool:
        """Return whether it is decided which tier serves a load.

        That is when every tier has answered or is past its deadline; when some tier has something to load, and no open
        one could do better; or when the grace after the first such answer is over.
        """
        now = time.monotonic()
        still_open = [tier for tier in self._answers if tier.is_open(now)]
        if not still_open:
            return True
        best, first_hit = 0.0, now
        for tier in self._answers:
            score = self._score(tier)
            if score > 0:
                best = max(best, score)
                first_hit = min(first_hit, tier.answered_at or now)
        if best == 0:
            return False
        could_be = self._reachable_tokens - self.question.computed_tokens
        return now >= first_hit + self._grace_seconds or all(could_be * t.load_weight <= best for t in still_open)

    def best(self) -> tuple[str, int]:
        """Return the tier with the highest matched tokens times weight, the first of equals, and its boundary.

        A tier that has not answered has nothing; where none has anything, the boundary is what is computed already.
        """
        best = max(self._answers, key=self._score)
        answer = best.get()
        return best.name, self.question.computed_tokens if answer is None else answer.boundary_tokens

    def missing(self) -> set[ChunkRef]:
        """Return chunks asked for that no tier has.

        A tier without an answer at its deadline has no say in it. While one may still answer nothing counts as missing,
        since that tier may have it.
        """
        now = time.monotonic()
        answers = [answer for tier in self._answers if (answer := tier.get()) is not None]
        if not answers or any(tier.is_open(now) for tier in self._answers):
            return set()
        return set.intersection(*(set(answer.missing) for answer in answers))

    def answers(self) -> dict[str, PrefixAnswer]:
        """Return the answers that have come, per tier."""
        return {tier.name: answer for tier in self._answers if (answer := tier.get()) is not None}

    def _score(self, tier: TierAnswer) -> float:
        answer = tier.get()
        return 0.0 if answer is None else (answer.boundary_tokens - self.question.computed_tokens) * tier.load_weight


class LookupService:
    """Starts lookups on the I/O loop and lets an idle engine wait briefly for an answer.

    Args:
        grace_seconds: see :class:`Lookup`.
        indexes: per name of a tier that is not to be asked itself, what it holds.
        unavailable: names of tiers of which nothing is to be loaded for now; read at each start of a lookup.
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
    ) -> None:
        self._io = io
        self._tiers = tuple(tiers)
        self._indexes = indexes or {}
        self._planner = planner
        self._grace_seconds = grace_seconds
        self._counters = counters
        self._unavailable = unavailable
        self._answered = threading.Event()

    def start(self, question: PrefixQuestion, patience_seconds: float = math.inf) -> Lookup:
        """Ask every tier that is available; of the others there is no answer, at once.

        Args:
            patience_seconds: how long the caller can wait for answers, where that is less than the tiers' deadlines; it
                is no fault of a tier when it answers after this.
        """
        started = time.monotonic()
        answers = []
        for tier in self._tiers:
            timeout_seconds = tier.limits.lookup_timeout_seconds
            answer = self._answer(tier, question, started + timeout_seconds)
            wanted_until = started + min(timeout_seconds, patience_seconds)
            answers.append(TierAnswer(tier.name, tier.load_weight, answer, wanted_until))
            answer.add_done_callback(log_unexpected)
            answer.add_done_callback(lambda _: self._answered.set())
        reachable_tokens = self._planner.storable_prefix(question.limit_tokens)
        return Lookup(question, answers, reachable_tokens, self._grace_seconds, started)

    def wait_for_answer(self, seconds: float) -> None:
        """Wait until some lookup is answered, at most ``seconds``. For a step in which the engine has no other work."""
        self._answered.wait(seconds)
        self._answered.clear()

    def _answer(self, tier: Tier, question: PrefixQuestion, deadline: float) -> Future[PrefixAnswer | None]:
        answered: Future[PrefixAnswer | None] = Future()
        index = self._indexes.get(tier.name)
        if tier.name in self._unavailable:
            self._counters.add("breaker_refused", tier.name)
            answered.set_result(None)
        elif index is not None:
            answered.set_result(self._look_up(tier, index, question))
        elif not tier.health.admits("lookup"):
            answered.set_result(None)
        else:
            return self._io.submit(self._ask(tier, question, deadline))
        return answered

    def _look_up(self, tier: Tier, index: TierIndex, question: PrefixQuestion) -> PrefixAnswer:
        """Answer from the index, on the caller's thread."""
        search = _prefix_search(self._planner, question, tier.name)
        asked_count = hits = 0
        try:
            asked = next(search)
            while True:
                present = [
                    index.present(question.namespaces, part.pack.name, _hashes(question, part)) for part in asked
                ]
                asked_count += sum(map(len, present))
                hits += sum(flags.count(True) for flags in present)
                asked = search.send(present)
        except StopIteration as end:
            ranks = len(question.namespaces)
            self._counters.add("lookup_hits", tier.name, hits * ranks)
            self._counters.add("lookup_misses", tier.name, (asked_count - hits) * ranks)
            answer: PrefixAnswer = end.value
            return answer

    async def _ask(self, tier: Tier, question: PrefixQuestion, deadline: float) -> PrefixAnswer | None:
        """Answer by asking the medium; past the deadline it is not asked again. Cancellation leaves nothing behind."""
        search = _prefix_search(self._planner, question, tier.name)
        try:
            asked = next(search)
            while (seconds := deadline - time.monotonic()) > 0:
                asked = search.send(await _present(tier, question, asked, seconds))
        except StopIteration as end:
            answer: PrefixAnswer = end.value
            return answer
        return None


def _prefix_search(
    planner: HybridOffloadPlanner, question: PrefixQuestion, tier: str
) -> Generator[Sequence[UnitRange], Sequence[Sequence[bool]], PrefixAnswer]:
    """Drive the planner's search: distrust what is mistrusted, and note what is missing."""
    missing: list[ChunkRef] = []
    search = planner.search(question.computed_tokens, question.limit_tokens)
    try:
        asked = next(search)
        while True:
            present = yield asked
            trusted: list[Sequence[bool]] = []
            for part, flags in zip(asked, present, strict=True):
                if question.mistrusted or False in flags:
                    refs = [ChunkRef(part.pack.name, digest, question.adapter) for digest in _hashes(question, part)]
                    trust = ((tier, ref) not in question.mistrusted for ref in refs)
                    flags = [there and trusted for there, trusted in zip(flags, trust, strict=True)]
                    missing += (ref for ref, there in zip(refs, flags, strict=True) if not there)
                trusted.append(flags)
            asked = search.send(trusted)
    except StopIteration as end:
        return PrefixAnswer(end.value, tuple(missing))


def _hashes(question: PrefixQuestion, part: UnitRange) -> Sequence[bytes]:
    units = part.units
    return question.hashes[part.pack.name][units.start : units.stop : units.step]


async def _present(
    tier: Tier, question: PrefixQuestion, asked: Sequence[UnitRange], seconds: float
) -> list[list[bool]]:
    """Ask ``tier`` for all ranks' parts of the units; returns, per range, whether each unit is there in full."""
    keys: list[ObjectKey] = []
    parts = [_hashes(question, part) for part in asked]
    for namespace in question.namespaces:
        for part, hashes in zip(asked, parts, strict=True):
            keys += object_keys(namespace, part.pack.name, hashes)
    flags = await tier.lookup(keys, seconds)
    per_rank = len(keys) // len(question.namespaces)
    if per_rank < len(keys):
        flags = [all(flags[unit::per_rank]) for unit in range(per_rank)]
    ends = list(accumulate(map(len, parts)))
    return [flags[end - len(hashes) : end] for end, hashes in zip(ends, parts, strict=True)]
