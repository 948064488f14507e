"""The search for the deepest usable prefix, without any I/O: it yields what it wants to know and is sent the answers.

Packs of full attention bound the depth, so they are asked first, all of them at once, from the computed prefix upwards
until a unit is missing. The other packs need only what lies just below a boundary, so they are asked downwards from the
deepest candidate. In both directions the batches grow, so that a miss costs little and a long hit few round trips; no
unit is asked for twice, and the work is linear in the units that are asked for.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

from offload_core.planning.packs import Pack

_FIRST_BATCH_UNITS = 16
_BATCH_GROWTH = 16
_ABSENT = b"\0"
_PRESENT = b"\1"


class UnitRange(NamedTuple):
    """A question: which of these units of ``pack`` are there?"""

    pack: Pack
    units: range


Search = Generator[tuple[UnitRange, ...], Sequence[Sequence[bool]], int]


def search(packs: Sequence[Pack], boundary_tokens: int, computed_tokens: int, limit_tokens: int) -> Search:
    """Search for the deepest boundary in ``(computed_tokens, limit_tokens]`` at which every pack is satisfied.

    Yields what to ask for; wants to be sent one sequence of flags for each :class:`UnitRange`, one flag per unit, in
    order. Returns the boundary, or ``computed_tokens`` when none is usable.

    Raises:
        ValueError: the answer's shape is not the question's.
    """
    candidate = limit_tokens - limit_tokens % boundary_tokens
    full = [pack for pack in packs if pack.policy.kind == "full"]
    next_unit = [computed_tokens // pack.unit_tokens for pack in full]
    batch_units = _FIRST_BATCH_UNITS
    while candidate > computed_tokens:
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
    trailing = [
        _Trailing(pack, boundary_tokens, computed_tokens, candidate) for pack in packs if pack.policy.kind != "full"
    ]
    while candidate > computed_tokens:
        bound = min((tail.bound(candidate) for tail in trailing), default=candidate)
        if bound < candidate:
            candidate = _boundary_within(bound, candidate, boundary_tokens)
            continue
        asking = [tail for tail in trailing if not tail.satisfied(candidate)]
        if not asking:
            return candidate
        asked = tuple(tail.ask(candidate) for tail in asking)
        for tail, (_, flags) in zip(asking, _answers(asked, (yield asked)), strict=True):
            tail.learn(flags)
    return computed_tokens


def _boundary_within(tokens: int, candidate: int, boundary_tokens: int) -> int:
    return min(candidate, tokens - tokens % boundary_tokens)


def _answers(asked: Sequence[UnitRange], answers: Sequence[Sequence[bool]]) -> Iterator[tuple[UnitRange, bytes]]:
    """Pair questions with their answers, as bytes of 0 and 1, which are searched fastest."""
    if len(answers) != len(asked):
        raise ValueError(f"asked about {len(asked)} ranges of units, but {len(answers)} answers came")
    for question, answer in zip(asked, answers, strict=True):
        if len(answer) != len(question.units):
            raise ValueError(
                f"pack {question.pack.name}: asked about {len(question.units)} units, but {len(answer)} flags came"
            )
        yield question, bytes(answer)


class _Trailing:
    """What is known of a pack that needs only what lies just below a boundary.

    It counts in spans: a unit, or for a recurrent pack, of which only the units that end at a boundary matter, the
    tokens between two boundaries. Spans from ``low`` up have been asked for, or lie above every candidate to come;
    ``flags`` tell which of them are there, as far as that still matters. Spans from ``verified`` up to the candidate
    are all there. Both only move down.
    """

    def __init__(self, pack: Pack, boundary_tokens: int, computed_tokens: int, candidate: int) -> None:
        self._pack = pack
        self._span_tokens = boundary_tokens if pack.policy.kind == "state" else pack.unit_tokens
        self._computed_tokens = computed_tokens
        self._low = self._verified = candidate // self._span_tokens
        self._flags = b""
        self._batch_spans = _FIRST_BATCH_UNITS

    def bound(self, candidate: int) -> int:
        """Return ``candidate``, or the token count above which what is known to be missing leaves no candidate."""
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
        # Every candidate needs the span just below it, but for those at which an attention chunk ends.
        bound = (self._low + self._flags.rfind(_PRESENT, 0, missing) + 1) * self._span_tokens
        if self._pack.policy.kind == "chunked":
            bound = max(bound, self._pack.policy.first_needed_token(self._verified * self._span_tokens))
        return bound

    def satisfied(self, candidate: int) -> bool:
        """Return whether all that ``candidate`` needs is known to be there."""
        return self._first_needed(candidate) >= self._verified

    def ask(self, candidate: int) -> UnitRange:
        """Ask for what ``candidate`` needs and is not known, and for some spans below that."""
        end = self._low
        floor = self._computed_tokens // self._span_tokens
        self._low = max(floor, min(self._first_needed(candidate), end - self._batch_spans))
        self._batch_spans *= _BATCH_GROWTH
        stride = self._span_tokens // self._pack.unit_tokens
        return UnitRange(self._pack, range((self._low + 1) * stride - 1, end * stride, stride))

    def learn(self, flags: bytes) -> None:
        """Take the answer to what was asked last."""
        self._flags = flags

    def _first_needed(self, candidate: int) -> int:
        first_token = max(self._computed_tokens, self._pack.policy.first_needed_token(candidate))
        return first_token // self._span_tokens
