"""Asynchronous lookups with a deadline, for the scheduler half: how deep a prefix does each tier hold?"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate

from offload_core.keys import ChunkRef, ObjectKey, object_keys
from offload_core.planner import HybridOffloadPlanner, UnitRange
from offload_core.runtime import IoLoop, log_unexpected
from offload_core.stats import Counters
from offload_core.tier import Tier
from offload_core.tier_index import TierIndex


@dataclass(frozen=True)
class PrefixQuestion:
    """How much of one sequence of tokens is there?

    Args:
        hashes: per pack name, the chunk hash of each unit from the start of the sequence.
        namespaces: one per rank; a chunk is there when every rank has its part.
        computed_tokens: prefix that the engine holds itself.
        limit_tokens: deepest prefix of use.
        adapter: see :class:`ChunkRef`.
        mistrusted: chunks that count as missing.
    """

    hashes: Mapping[str, Sequence[bytes]]
    namespaces: tuple[str, ...]
    computed_tokens: int
    limit_tokens: int
    adapter: str = ""
    mistrusted: Collection[ChunkRef] = ()


@dataclass(frozen=True)
class PrefixAnswer:
    """The deepest usable boundary in tokens, and those of the chunks asked for that were not there."""

    boundary_tokens: int
    missing: tuple[ChunkRef, ...] = ()


class Lookup:
    """One question to all tiers. ``done`` and ``answers`` are for the thread that started it."""

    def __init__(
        self, question: PrefixQuestion, answers: dict[str, Future[PrefixAnswer]], started: float, deadline: float
    ) -> None:
        self.question = question
        self.started = started
        """When the tiers were asked, by the monotonic clock."""
        self._answers = answers
        self._deadline = deadline

    def done(self) -> bool:
        """Return whether every tier has answered or the deadline has passed."""
        return all(answer.done() for answer in self._answers.values()) or time.monotonic() >= self._deadline

    def unanswered(self) -> list[str]:
        """Return the tiers that have not answered."""
        return [name for name, answer in self._answers.items() if not answer.done()]

    def answers(self) -> dict[str, PrefixAnswer]:
        """Return each tier's answer; one that has not answered has nothing."""
        nothing = PrefixAnswer(self.question.computed_tokens)
        return {
            name: answer.result() if answer.done() and answer.exception() is None else nothing
            for name, answer in self._answers.items()
        }


class LookupService:
    """Starts lookups on the I/O loop and lets an idle engine wait briefly for an answer.

    Args:
        indexes: per name of a tier that is not to be asked itself, what it holds.
    """

    def __init__(
        self,
        io: IoLoop,
        tiers: Sequence[Tier],
        planner: HybridOffloadPlanner,
        timeout_seconds: float,
        counters: Counters,
        indexes: Mapping[str, TierIndex] | None = None,
    ) -> None:
        self._io = io
        self._tiers = tuple(tiers)
        self._indexes = indexes or {}
        self._planner = planner
        self._timeout_seconds = timeout_seconds
        self._counters = counters
        self._answered = threading.Event()

    def start(self, question: PrefixQuestion) -> Lookup:
        """Ask every tier."""
        started = time.monotonic()
        answers = {tier.name: self._answer(tier, question) for tier in self._tiers}
        for answer in answers.values():
            answer.add_done_callback(log_unexpected)
            answer.add_done_callback(lambda _: self._answered.set())
        return Lookup(question, answers, started, started + self._timeout_seconds)

    def give_up(self, lookup: Lookup) -> None:
        """Count the tiers that had not answered ``lookup`` at its deadline."""
        for name in lookup.unanswered():
            self._counters.add("lookup_failures", name)

    def wait_for_answer(self, seconds: float) -> None:
        """Wait until some lookup is answered, at most ``seconds``. For a step in which the engine has no other work."""
        self._answered.wait(seconds)
        self._answered.clear()

    def _answer(self, tier: Tier, question: PrefixQuestion) -> Future[PrefixAnswer]:
        index = self._indexes.get(tier.name)
        if index is None:
            return self._io.submit(self._ask(tier, question))
        answered: Future[PrefixAnswer] = Future()
        answered.set_result(self._look_up(tier, index, question))
        return answered

    def _look_up(self, tier: Tier, index: TierIndex, question: PrefixQuestion) -> PrefixAnswer:
        """Answer from the index, on the caller's thread."""
        search = _prefix_search(self._planner, question)
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

    async def _ask(self, tier: Tier, question: PrefixQuestion) -> PrefixAnswer:
        """Answer by asking the medium. Cancellation leaves nothing behind."""
        search = _prefix_search(self._planner, question)
        try:
            asked = next(search)
            while True:
                asked = search.send(await _present(tier, question, asked))
        except StopIteration as end:
            answer: PrefixAnswer = end.value
            return answer


def _prefix_search(
    planner: HybridOffloadPlanner, question: PrefixQuestion
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
                    flags = [there and ref not in question.mistrusted for there, ref in zip(flags, refs, strict=True)]
                    missing += (ref for ref, there in zip(refs, flags, strict=True) if not there)
                trusted.append(flags)
            asked = search.send(trusted)
    except StopIteration as end:
        return PrefixAnswer(end.value, tuple(missing))


def _hashes(question: PrefixQuestion, part: UnitRange) -> Sequence[bytes]:
    units = part.units
    return question.hashes[part.pack.name][units.start : units.stop : units.step]


async def _present(tier: Tier, question: PrefixQuestion, asked: Sequence[UnitRange]) -> list[list[bool]]:
    """Ask ``tier`` for all ranks' parts of the units; returns, per range, whether each unit is there in full."""
    keys: list[ObjectKey] = []
    parts = [_hashes(question, part) for part in asked]
    for namespace in question.namespaces:
        for part, hashes in zip(asked, parts, strict=True):
            keys += object_keys(namespace, part.pack.name, hashes)
    flags = await tier.lookup(keys)
    per_rank = len(keys) // len(question.namespaces)
    if per_rank < len(keys):
        flags = [all(flags[unit::per_rank]) for unit in range(per_rank)]
    ends = list(accumulate(map(len, parts)))
    return [flags[end - len(hashes) : end] for end, hashes in zip(ends, parts, strict=True)]
