"""The search for the deepest usable prefix. It does no I/O: it yields questions and is sent the answers.

Packs of full attention limit the depth. The search therefore asks about all of them first, from the computed prefix
upwards until a unit is missing. The other packs need only the units just below a boundary. The search asks about these
downwards from the deepest candidate.

The engine may hold full attention deeper than windows or states, because it evicted these. Then the first part begins
where its attention ends. The second part goes on below that depth. There a boundary also needs the last unit of full
attention before it, because the engine takes no load without one.

In both directions the batches grow: a miss costs little, and a long hit takes few round trips. The search asks about no
unit twice, and its work is linear in the number of these units.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from offload_core.planning.hit_policy import HitPolicy
from offload_core.planning.packs import Pack

FIRST_BATCH_UNITS = 16
"""Units of each pack in the first question, by default."""
_BATCH_GROWTH = 16
_LAST_UNIT = HitPolicy("state")
"""The policy of a pack of which a boundary needs only the unit that ends there."""
_ABSENT = b"\0"
_PRESENT = b"\1"


class UnitRange(NamedTuple):
    """A question: which of these units of ``pack`` are present?"""

    pack: Pack
    units: range


class PrefixDepth(NamedTuple):
    """The result of a search."""

    usable_tokens: int
    """The deepest boundary at which every pack is satisfied."""
    attention_tokens: int
    """The deepest boundary at which all packs of full attention are. Without such packs, as deep as the search went."""


Search = Generator[tuple[UnitRange, ...], Sequence[Sequence[bool]], PrefixDepth]


def search(
    packs: Sequence[Pack],
    boundary_tokens: int,
    computed_tokens: int,
    limit_tokens: int,
    first_batch_units: int = FIRST_BATCH_UNITS,
    local_attention_tokens: int = 0,
) -> Search:
    """Search for the deepest boundary in ``(computed_tokens, limit_tokens]`` at which every pack is satisfied.

    The generator yields questions. Send it one sequence of flags for each :class:`UnitRange`, one flag per unit, in
    order. It returns the depths, ``computed_tokens`` where no boundary will do.

    Args:
        first_batch_units: units of each pack in the first question, unless a boundary needs more.
        local_attention_tokens: see :meth:`HybridOffloadPlanner.search`.

    Raises:
        ValueError: an answer does not have the shape of its question.
    """
    candidate = limit_tokens - limit_tokens % boundary_tokens
    full = [pack for pack in packs if pack.policy.kind == "full"]
    held_tokens = max(computed_tokens, local_attention_tokens)
    next_unit = [held_tokens // pack.unit_tokens for pack in full]
    batch_units = first_batch_units
    while candidate > held_tokens:
        ends = [min(first + batch_units, pack.units_in(candidate)) for pack, first in zip(full, next_unit, strict=True)]
        asked = tuple(
            UnitRange(pack, range(first, end))
            for pack, first, end in zip(full, next_unit, ends, strict=True)
            if first < end
        )
        if not asked:
            break
        for (pack, units), flags in _answers(asked, (yield asked)):
            missing = flags.find(_ABSENT)
            if missing >= 0:
                candidate = _boundary_within(pack.tokens_in(units.start + missing), candidate, boundary_tokens)
        next_unit = ends
        batch_units *= _BATCH_GROWTH
    held_boundary = held_tokens if held_tokens == computed_tokens else held_tokens - held_tokens % boundary_tokens
    attention_tokens = candidate = max(candidate, held_boundary)
    downward = [
        _DownwardSearch(pack, boundary_tokens, computed_tokens, candidate, first_batch_units)
        for pack in packs
        if pack.policy.kind != "full"
    ]
    if held_tokens > computed_tokens:
        downward += (
            _DownwardSearch(
                replace(pack, policy=_LAST_UNIT), boundary_tokens, computed_tokens, held_boundary, first_batch_units
            )
            for pack in full
        )
    while candidate > computed_tokens:
        limit = min((pack_search.upper_limit(candidate) for pack_search in downward), default=candidate)
        if limit < candidate:
            candidate = _boundary_within(limit, candidate, boundary_tokens)
            continue
        asking = [pack_search for pack_search in downward if not pack_search.satisfied(candidate)]
        if not asking:
            return PrefixDepth(candidate, attention_tokens)
        asked = tuple(pack_search.ask(candidate) for pack_search in asking)
        for pack_search, (_, flags) in zip(asking, _answers(asked, (yield asked)), strict=True):
            pack_search.take_answer(flags)
    return PrefixDepth(computed_tokens, attention_tokens)


def _boundary_within(tokens: int, candidate: int, boundary_tokens: int) -> int:
    return min(candidate, tokens - tokens % boundary_tokens)


def _answers(asked: Sequence[UnitRange], answers: Sequence[Sequence[bool]]) -> Iterator[tuple[UnitRange, bytes]]:
    """Pair questions with their answers, as bytes of 0 and 1, because a search in bytes is fastest."""
    if len(answers) != len(asked):
        raise ValueError(f"{len(asked)} ranges of units were asked about, but {len(answers)} answers came")
    for question, answer in zip(asked, answers, strict=True):
        if len(answer) != len(question.units):
            raise ValueError(
                f"pack {question.pack.name}: {len(question.units)} units were asked about, but {len(answer)} flags came"
            )
        yield question, bytes(answer)


class _DownwardSearch:
    """The search in one pack that needs only the units just below a boundary. It goes downwards.

    It counts in spans. A span is usually one unit. For a recurrent pack it is the distance between two boundaries,
    because only the units that end at a boundary matter.

    ``low`` is the first span that needs no question: it was asked about, or lies above all later candidates. The
    ``flags`` begin there and tell the present spans. All spans from ``verified`` up to the candidate are present. Both
    positions only move down.
    """

    def __init__(
        self, pack: Pack, boundary_tokens: int, computed_tokens: int, candidate: int, first_batch_spans: int
    ) -> None:
        self._pack = pack
        self._span_tokens = boundary_tokens if pack.policy.kind == "state" else pack.unit_tokens
        self._computed_tokens = computed_tokens
        self._low = self._verified = candidate // self._span_tokens
        self._flags = b""
        self._batch_spans = first_batch_spans

    def upper_limit(self, candidate: int) -> int:
        """Return an upper limit in tokens for the next candidate, as far as the missing spans are known.

        It is ``candidate`` itself if no missing span rules that out.
        """
        end = candidate // self._span_tokens
        self._low = min(self._low, end)
        self._verified = min(self._verified, end)
        first = max(self._low, self._first_needed(candidate))
        if first >= self._verified:
            return candidate
        missing = self._flags.find(_ABSENT, first - self._low, self._verified - self._low)
        if missing < 0:
            self._verified = first
            return candidate
        self._verified = self._low + missing
        # Every candidate needs the span just below it, except for candidates at the end of an attention chunk.
        limit = (self._low + self._flags.rfind(_PRESENT, 0, missing) + 1) * self._span_tokens
        if self._pack.policy.kind == "chunked":
            limit = max(limit, self._pack.policy.first_needed_token(self._verified * self._span_tokens))
        return limit

    def satisfied(self, candidate: int) -> bool:
        """Return ``True`` if all spans that ``candidate`` needs are known to be present."""
        return self._first_needed(candidate) >= self._verified

    def ask(self, candidate: int) -> UnitRange:
        """Return a question about the unknown spans that ``candidate`` needs, and about some spans below them."""
        end = self._low
        floor = self._computed_tokens // self._span_tokens
        self._low = max(floor, min(self._first_needed(candidate), end - self._batch_spans))
        self._batch_spans *= _BATCH_GROWTH
        stride = self._span_tokens // self._pack.unit_tokens
        return UnitRange(self._pack, range((self._low + 1) * stride - 1, end * stride, stride))

    def take_answer(self, flags: bytes) -> None:
        """Take the answer to the last question."""
        self._flags = flags

    def _first_needed(self, candidate: int) -> int:
        first_token = max(self._computed_tokens, self._pack.policy.first_needed_token(candidate))
        return first_token // self._span_tokens
