"""Asynchronous lookups with a deadline, for the scheduler half."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

from offload_core.keys import ObjectKey
from offload_core.runtime import IoLoop
from offload_core.stats import Counters
from offload_core.tier import Tier


class Lookup:
    """One question to all tiers: which of these keys are there?

    ``done`` and ``present`` are for the thread that started it.
    """

    def __init__(self, answers: dict[str, Future[list[bool]]], num_keys: int, deadline: float) -> None:
        self._answers = answers
        self._num_keys = num_keys
        self._deadline = deadline

    def done(self) -> bool:
        """Return whether every tier has answered or the deadline has passed."""
        return all(answer.done() for answer in self._answers.values()) or time.monotonic() >= self._deadline

    def unanswered(self) -> list[str]:
        """Return the tiers that have not answered."""
        return [name for name, answer in self._answers.items() if not answer.done()]

    def present(self) -> dict[str, list[bool]]:
        """Return, per tier, whether each key is there; a tier without an answer has nothing."""
        return {
            name: answer.result() if answer.done() and answer.exception() is None else [False] * self._num_keys
            for name, answer in self._answers.items()
        }


class LookupService:
    """Starts lookups on the I/O loop and lets an idle engine wait briefly for an answer."""

    def __init__(self, io: IoLoop, tiers: Sequence[Tier], timeout_seconds: float, counters: Counters) -> None:
        self._io = io
        self._tiers = tuple(tiers)
        self._timeout_seconds = timeout_seconds
        self._counters = counters
        self._answered = threading.Event()

    def start(self, keys: Sequence[ObjectKey]) -> Lookup:
        """Ask every tier for ``keys``."""
        answers = {tier.name: self._io.submit(tier.lookup(keys)) for tier in self._tiers}
        lookup = Lookup(answers, len(keys), time.monotonic() + self._timeout_seconds)
        for answer in answers.values():
            answer.add_done_callback(lambda _: self._answered.set())
        return lookup

    def give_up(self, lookup: Lookup) -> None:
        """Count the tiers that had not answered ``lookup`` at its deadline."""
        for name in lookup.unanswered():
            self._counters.add("lookup_failures", name)

    def wait_for_answer(self, seconds: float) -> None:
        """Wait until some lookup is answered, at most ``seconds``. For a step in which the engine has no other work."""
        self._answered.wait(seconds)
        self._answered.clear()
