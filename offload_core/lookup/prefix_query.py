"""Queries about prefixes, and the answers of tiers."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from offload_core.planning.chunk_keys import ChunkRef


@dataclass(frozen=True)
class PrefixQuery:
    """A query for the deepest usable prefix of one sequence of tokens.

    Args:
        hashes: per pack name, the chunk hash of each unit from the start of the sequence.
        namespaces: one per rank. A chunk is present when every rank has its part.
        computed_tokens: prefix that the engine holds itself.
        limit_tokens: deepest prefix of use.
        adapter: see :class:`ChunkRef`.
        excluded: pairs of a tier's name and a chunk that counts as missing there.
        local_attention_tokens: see :meth:`HybridOffloadPlanner.search`.
        total_tokens: all tokens of the sequence, with those behind ``limit_tokens`` that are computed in any case.
    """

    hashes: Mapping[str, Sequence[bytes]]
    namespaces: tuple[str, ...]
    computed_tokens: int
    limit_tokens: int
    adapter: str = ""
    excluded: Collection[tuple[str, ChunkRef]] = ()
    local_attention_tokens: int = 0
    total_tokens: int = 0


@dataclass(frozen=True)
class PrefixAnswer:
    """A tier's answer.

    Args:
        boundary_tokens: the deepest usable boundary.
        attention_tokens: the deepest boundary at which all packs of full attention are present.
        missing: the missing chunks among those looked up.
    """

    boundary_tokens: int
    attention_tokens: int
    missing: tuple[ChunkRef, ...] = ()


class TierAnswer:
    """One tier's answer to a query, present or still to come. For the thread that sent the query.

    Args:
        answer: its result is ``None`` if the tier gives no answer.
        deadline: by the monotonic clock.
    """

    def __init__(self, name: str, answer: Future[PrefixAnswer | None], deadline: float) -> None:
        self.name = name
        self.deadline = deadline
        self.answered_at: float | None = None
        self._answer = answer
        answer.add_done_callback(self._set_time)

    def is_open(self, now: float) -> bool:
        """Return whether the tier may still answer before its deadline."""
        return not self._answer.done() and now < self.deadline

    def get(self) -> PrefixAnswer | None:
        """Return the answer, or ``None`` if there is none yet, or the query failed unexpectedly."""
        if not self._answer.done() or self._answer.exception() is not None:
            return None
        return self._answer.result()

    def _set_time(self, _: Future[PrefixAnswer | None]) -> None:
        self.answered_at = time.monotonic()
