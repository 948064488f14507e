"""Questions about prefixes, and the answers of tiers."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from offload_core.planning.chunk_keys import ChunkRef


@dataclass(frozen=True)
class PrefixQuestion:
    """How much of one sequence of tokens is there?

    Args:
        hashes: per pack name, the chunk hash of each unit from the start of the sequence.
        namespaces: one per rank; a chunk is there when every rank has its part.
        computed_tokens: prefix that the engine holds itself.
        limit_tokens: deepest prefix of use.
        adapter: see :class:`ChunkRef`.
        mistrusted: names of tiers and chunks that count as missing there.
    """

    hashes: Mapping[str, Sequence[bytes]]
    namespaces: tuple[str, ...]
    computed_tokens: int
    limit_tokens: int
    adapter: str = ""
    mistrusted: Collection[tuple[str, ChunkRef]] = ()


@dataclass(frozen=True)
class PrefixAnswer:
    """The deepest usable boundary in tokens, and those of the chunks asked for that were not there."""

    boundary_tokens: int
    missing: tuple[ChunkRef, ...] = ()


class TierAnswer:
    """One tier's answer to a question, which may not be there yet. For the thread that asked.

    Args:
        answer: ``None`` when there is none to come.
        deadline: by the monotonic clock.
    """

    def __init__(self, name: str, load_weight: float, answer: Future[PrefixAnswer | None], deadline: float) -> None:
        self.name = name
        self.load_weight = load_weight
        self.deadline = deadline
        self.answered_at: float | None = None
        self._answer = answer
        answer.add_done_callback(self._note_time)

    def is_open(self, now: float) -> bool:
        """Return whether the tier may still answer in time."""
        return not self._answer.done() and now < self.deadline

    def get(self) -> PrefixAnswer | None:
        """Return the answer, or ``None`` when there is none or something has gone wrong that nobody expected."""
        if not self._answer.done() or self._answer.exception() is not None:
            return None
        return self._answer.result()

    def _note_time(self, _: Future[PrefixAnswer | None]) -> None:
        self.answered_at = time.monotonic()
