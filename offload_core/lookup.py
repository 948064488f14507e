"""Asynchronous lookups with a deadline, for the scheduler half: how deep a prefix does each tier hold?"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from offload_core.keys import ChunkRef, ObjectKey, object_keys
from offload_core.planner import HybridOffloadPlanner, UnitRange
from offload_core.runtime import IoLoop, log_unexpected
from offload_core.stats import Counters
from offload_core.tier import Tier


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
    """Starts lookups on the I/O loop and lets an idle engine wait briefly for an answer."""

    def __init__(
        self,
        io: IoLoop,
        tiers: Sequence[Tier],
        planner: HybridOffloadPlanner,
        timeout_seconds: float,
        counters: Counters,
    ) -> None:
        self._io = io
        self._tiers = tuple(tiers)
        self._planner = planner
        self._timeout_seconds = timeout_seconds
        self._counters = counters
        self._answered = threading.Event()

    def start(self, question: PrefixQuestion) -> Lookup:
        """Ask every tier."""
        started = time.monotonic()
        answers = {tier.name: self._io.submit(self._search(tier, question)) for tier in self._tiers}
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

    async def _search(self, tier: Tier, question: PrefixQuestion) -> PrefixAnswer:
        """Drive the planner's search with what ``tier`` holds. Cancellation leaves nothing behind."""
        missing: list[ChunkRef] = []
        search = self._planner.search(question.computed_tokens, question.limit_tokens)
        try:
            asked = next(search)
            while True:
                present = await _present(tier, question, asked)
                for part, flags in zip(asked, present, strict=True):
                    if False in flags:
                        hashes = question.hashes[part.pack.name]
                        missing += (
                            ChunkRef(part.pack.name, hashes[unit], question.adapter)
                            for unit, there in zip(part.units, flags, strict=True)
                            if not there
                        )
                asked = search.send(present)
        except StopIteration as end:
            return PrefixAnswer(end.value, tuple(missing))


def _slice(units: range) -> slice:
    return slice(units.start, units.stop, units.step)


async def _present(tier: Tier, question: PrefixQuestion, asked: Sequence[UnitRange]) -> list[list[bool]]:
    """Ask ``tier`` for all ranks' parts of the units; returns, per range, whether each unit is there in full."""
    keys: list[ObjectKey] = []
    parts = [question.hashes[part.pack.name][_slice(part.units)] for part in asked]
    for namespace in question.namespaces:
        for part, hashes in zip(asked, parts, strict=True):
            keys += object_keys(namespace, part.pack.name, hashes)
    flags = await tier.lookup(keys)
    per_rank = len(keys) // len(question.namespaces)
    if per_rank < len(keys):
        flags = [all(flags[unit::per_rank]) for unit in range(per_rank)]
    present: list[list[bool]] = []
    start = 0
    for part, hashes in zip(asked, parts, strict=True):
        mine = flags[start : start + len(hashes)]
        start += len(hashes)
        if question.mistrusted:
            mine = [
                there and ChunkRef(part.pack.name, chunk_hash, question.adapter) not in question.mistrusted
                for there, chunk_hash in zip(mine, hashes, strict=True)
            ]
        present.append(mine)
    return present
