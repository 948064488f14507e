"""The resync: from time to time, media are asked about all chunks that readers know, and readers are told again.

It finds the objects that another process has removed, and brings readers up to date that have missed announcements.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from offload_core.api.keys import ObjectKey
from offload_core.lookup.announcing.announcements import Announcements
from offload_core.planning.chunk_keys import ChunkRef
from offload_core.runtime.io_loop import IoLoop, log_unexpected
from offload_core.tiers.tier import Tier

_CHUNKS_PER_CHECK = 64


class _Check(NamedTuple):
    """A question to one tier about some chunks, under way."""

    tier: str
    chunks: Sequence[tuple[ChunkRef, int | None]]
    """Each chunk with its version at the time of the question."""
    answer: Future[list[bool] | None]


class Resync:
    """Checks and repeats all chunks once per period, a few at a time. For the engine's thread; it never waits.

    A medium that only this engine sees is not asked, since it reports every change. A check that fails or is late
    leaves the chunks as they are.

    Args:
        keys: gives each rank's key of a chunk.
        period_seconds: time from the begin of a resync to the begin of the next one. It takes at most half of that,
            unless the engine makes few steps.
        clock: seconds.
    """

    def __init__(
        self,
        io: IoLoop,
        tiers: Iterable[Tier],
        announcements: Announcements[Any],
        keys: Callable[[ChunkRef], Sequence[ObjectKey]],
        period_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._io = io
        self._tiers = [tier for tier in tiers if tier.capabilities.shared]
        self._announcements = announcements
        self._keys = keys
        self._period_seconds = period_seconds
        self._clock = clock
        self._began = clock()
        self._left: deque[ChunkRef] = deque()
        self._total = 0
        self._asked: list[ChunkRef] = []
        self._checks: list[_Check] = []
        self._checks_end = 0.0

    def step(self) -> None:
        """Go on with the resync, or begin one if it is time."""
        now = self._clock()
        if self._checks and not self._take_answers(now):
            return
        if not self._left:
            if now < self._began + self._period_seconds or self._announcements.has_repeats:
                return
            self._began, self._left = now, deque(self._announcements.chunks())
            self._total = len(self._left)
        done = self._total - len(self._left)
        if self._left and now >= self._began + self._period_seconds / 2 * done / self._total:
            self._check([self._left.popleft() for _ in range(min(_CHUNKS_PER_CHECK, len(self._left)))], now)

    def forget(self) -> None:
        """End the resync that is under way."""
        self._left.clear()
        self._checks.clear()

    def _check(self, refs: list[ChunkRef], now: float) -> None:
        self._asked = refs
        chunks = [(ref, version) for ref in refs if (version := self._announcements.version(ref)) is not None]
        keys = [key for ref, _ in chunks for key in self._keys(ref)]
        for tier in self._tiers:
            answer = self._io.submit(tier.check(keys))
            answer.add_done_callback(log_unexpected)
            self._checks.append(_Check(tier.name, chunks, answer))
        self._checks_end = now + max((tier.limits.lookup_timeout_seconds for tier in self._tiers), default=0.0)
        if not self._checks:
            self._announcements.repeat(refs)

    def _take_answers(self, now: float) -> bool:
        """Apply the answers of all checks; false if some may still come."""
        if now < self._checks_end and not all(check.answer.done() for check in self._checks):
            return False
        for tier, chunks, answer in self._checks:
            present = answer.result() if answer.done() and answer.exception() is None else None
            if present:
                ranks = len(present) // len(chunks)
                for place, (ref, version) in enumerate(chunks):
                    self._announcements.checked(tier, ref, version, present[place * ranks : (place + 1) * ranks])
        self._checks.clear()
        self._announcements.repeat(self._asked)
        return True
