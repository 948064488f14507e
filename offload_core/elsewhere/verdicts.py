"""The answers about keys, for the scheduler thread of another system that must never wait for one."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Find = Callable[[Sequence[Key]], "Future[list[str | None]]"]
"""Asks for the tiers of some keys. It never waits."""


@dataclass(eq=False)
class Verdict:
    """The answer about one key: still open, or the name of a tier that has it, or ``None`` for a miss."""

    is_open: bool = True
    tier: str | None = None
    requests: set[str] = field(default_factory=set)


class Verdicts(Generic[Key]):
    """The answers that the running requests have asked for. All methods are for one thread, and none waits.

    An answer stays the same until the last request that asked for it has ended, so that a request sees one world. A
    load that fails turns its keys into misses. Otherwise the same load would be tried again and again.

    Args:
        find: finds the tiers of keys.
    """

    def __init__(self, find: Find[Key]) -> None:
        self._find = find
        self._verdicts: dict[Key, Verdict] = {}
        self._keys_of: dict[str, set[Key]] = defaultdict(set)
        self._new: dict[Key, Verdict] = {}
        self._answered: deque[tuple[list[Verdict], Future[list[str | None]]]] = deque()

    def ask(self, key: Key, request: str) -> Verdict:
        """Return the answer about a key. A new question leaves with the next :meth:`flush`."""
        self._take_answers()
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = self._new[key] = Verdict()
        verdict.requests.add(request)
        self._keys_of[request].add(key)
        return verdict

    def flush(self) -> None:
        """Send all new questions in one batch."""
        new, self._new = {key: verdict for key, verdict in self._new.items() if verdict.is_open}, {}
        if new:
            verdicts = list(new.values())
            self._find(list(new)).add_done_callback(lambda found: self._answered.append((verdicts, found)))

    def tier_of(self, key: Key) -> str | None:
        """Return the tier that has a key, as far as is known."""
        verdict = self._verdicts.get(key)
        return None if verdict is None else verdict.tier

    def doubt(self, keys: Iterable[Key]) -> None:
        """Turn keys into misses, for the requests that have asked for them."""
        for key in keys:
            if (verdict := self._verdicts.get(key)) is not None:
                verdict.is_open, verdict.tier = False, None

    def request_ended(self, request: str) -> None:
        """Forget the answers that only this request has asked for."""
        for key in self._keys_of.pop(request, ()):
            requests = self._verdicts[key].requests
            requests.discard(request)
            if not requests:
                del self._verdicts[key]
                self._new.pop(key, None)

    def _take_answers(self) -> None:
        while self._answered:
            verdicts, found = self._answered.popleft()
            tiers = [None] * len(verdicts) if found.exception() else found.result()
            for verdict, tier in zip(verdicts, tiers, strict=True):
                if verdict.is_open:  # not doubted meanwhile
                    verdict.is_open, verdict.tier = False, tier
