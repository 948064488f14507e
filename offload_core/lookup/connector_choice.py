"""The choice among several connectors that may hold a request's prefix: the most tokens times weight.

A connector answers a question with a number of tokens, or it is undecided. The usual case is that all are decided. If
some are not, the request waits for those that could still win, but not for ever:

- ``lookup_timeout_seconds`` after the first undecided answer, an undecided connector counts as a miss;
- ``lookup_grace_seconds`` after the first offer, the best offer is taken.

A connector that keeps failing or missing its deadline gets a pause. Until the pause ends, its answers count as misses.
Then one request waits for it again, as a probe.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from offload_core.config.connectors import ChoiceLimits
from offload_core.tiers.circuit_breaker import CircuitBreaker

logger = logging.getLogger(__name__)

FAILED: Literal["failed"] = "failed"
"""The answer of a connector that raised an error."""

Answer = int | None | Literal["failed"]
"""The tokens that a connector offers; ``None`` while it is undecided."""


@dataclass
class Question:
    """One request's question to all connectors, from its first answer until the request runs, loads or ends."""

    undecided_since: float | None = None
    """The time of the first undecided answer that the request waits for, by the monotonic clock in seconds."""
    offered_since: float | None = None
    """The time of the first offer during this wait."""
    given_up: set[int] = field(default_factory=set)
    """Connectors that the request waits for no more."""
    probed: set[int] = field(default_factory=set)
    """Paused connectors that this request tries."""
    offered: set[int] = field(default_factory=set)
    """Connectors with an offer in the latest answers."""
    late: set[int] = field(default_factory=set)
    """Connectors that did not decide within the deadline."""


@dataclass(frozen=True)
class Decision:
    """The outcome of the latest answers.

    Args:
        connector: the place of the connector that loads; ``None`` if none does.
        ask_again: whether the request waits for a connector.
    """

    connector: int | None = None
    ask_again: bool = False


class ConnectorChoice:
    """Chooses for each request. All methods run on the engine thread.

    Args:
        names: the connectors' names, for log lines.
        weights: the connectors' weights, in the same order. Of equal offers, the first one wins.
    """

    def __init__(self, names: Sequence[str], weights: Sequence[float], limits: ChoiceLimits) -> None:
        self._names = names
        self._weights = weights
        self._limits = limits
        self._breakers = [
            CircuitBreaker(limits.breaker_failures, limits.breaker_pause_seconds, limits.breaker_max_pause_seconds)
            for _ in names
        ]

    def choose(
        self, question: Question, answers: Sequence[Answer], most_tokens: int, busy: Sequence[bool], now: float
    ) -> Decision:
        """Return the decision from the answers to one question of the engine.

        Args:
            answers: one per connector, given now.
            most_tokens: the most tokens that a connector can offer.
            busy: per connector, whether it has loads under way. It may wait for one of them, which is no failure.
            now: monotonic seconds.
        """
        usable = [self._heard(question, place, answer, now) for place, answer in enumerate(answers)]
        offers = {place: answer for place, answer in enumerate(usable) if isinstance(answer, int) and answer > 0}
        question.offered = set(offers)
        best = max(offers, key=lambda place: self._rank(place, offers[place]), default=None)
        reached = -math.inf, 0
        if best is not None:
            reached = self._rank(best, offers[best])
        undecided = [place for place, answer in enumerate(usable) if answer is None]
        awaited = [
            place for place in undecided if place not in question.given_up and self._rank(place, most_tokens) > reached
        ]
        if awaited and self._may_wait(question, best is not None, now):
            return Decision(ask_again=True)
        if awaited:
            self._give_up(question, awaited, busy, now)
        question.undecided_since = question.offered_since = None
        return Decision(best)

    def ended(self, question: Question, now: float) -> None:
        """End a question. A probe that has no result by then has failed."""
        for place in question.probed:
            self._end_probe(place, answered=False, now=now)
        question.probed.clear()

    def _rank(self, place: int, tokens: int) -> tuple[float, int]:
        return tokens * self._weights[place], -place

    def _may_wait(self, question: Question, offered: bool, now: float) -> bool:
        if question.undecided_since is None:
            question.undecided_since = now
        if not offered:
            question.offered_since = None
        elif question.offered_since is None:
            question.offered_since = now
        in_time = now - question.undecided_since < self._limits.lookup_timeout_seconds
        since_offer = question.offered_since
        return in_time and (since_offer is None or now - since_offer < self._limits.lookup_grace_seconds)

    def _give_up(self, question: Question, awaited: Sequence[int], busy: Sequence[bool], now: float) -> None:
        """Wait for these connectors no more. If it was the deadline that ended the wait, they have missed it."""
        question.given_up.update(awaited)
        assert question.undecided_since is not None
        if now - question.undecided_since < self._limits.lookup_timeout_seconds:
            return
        for place in awaited:
            question.late.add(place)
            if place in question.probed:
                question.probed.discard(place)
                self._end_probe(place, answered=False, now=now)
            elif not busy[place]:
                before = self._breakers[place].state
                self._breakers[place].timed_out("lookup", now)
                self._report(place, before, f"gave no answer within {self._limits.lookup_timeout_seconds:g} s")

    def _heard(self, question: Question, place: int, answer: Answer, now: float) -> Answer:
        """Tell the connector's breaker its answer; return 0 in place of an answer that counts as a miss."""
        breaker = self._breakers[place]
        before = breaker.state
        if before != "closed" and place not in question.probed:
            if breaker.probe_at is None or now < breaker.probe_at:
                return 0
            breaker.begin_probe()
            question.probed.add(place)
            question.given_up.discard(place)
        if answer == FAILED:
            if place in question.probed:
                question.probed.discard(place)
                self._end_probe(place, answered=False, now=now)
            elif (call := breaker.begin("lookup")) is not None:
                breaker.failed(call, now)
                self._report(place, before, "keeps raising errors")
            return 0
        if answer is None:
            return None
        if place in question.probed:
            question.probed.discard(place)
            self._end_probe(place, answered=True, now=now)
        elif (call := breaker.begin("lookup")) is not None:
            breaker.succeeded(call, now)
        return answer

    def _end_probe(self, place: int, *, answered: bool, now: float) -> None:
        before = self._breakers[place].state
        self._breakers[place].probe_ended(answered, now)
        self._report(place, before, "")

    def _report(self, place: int, before: str, cause: str) -> None:
        breaker = self._breakers[place]
        if breaker.state == before:
            return
        if breaker.state == "open":
            logger.warning(
                "connector %r %s; for %g s its answers count as misses",
                self._names[place],
                cause,
                breaker.pause_seconds,
            )
        else:
            logger.warning("connector %r answers again and is used again", self._names[place])
