"""The search for the end of a prefix in few rounds of few questions. It does no I/O, as :mod:`.prefix_search`.

A unit that is present speaks for all units before it, because they were stored before it. So a k-ary search
finds the first missing unit: each round of questions divides the range that is left. If a unit before a present
one is missing all the same, the answer is too deep, and the load finds out.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

DepthSearch = Generator[list[int], Sequence[bool] | None, int]


def depth_search(first: int, end: int, rounds: int, *, needs_all: bool = True) -> DepthSearch:
    """Search for the first missing unit of ``range(first, end)``.

    The generator yields units to ask about, in ascending order, at most ``rounds`` times. Send it one flag for each. It
    returns the first missing unit, or ``end`` if none is missing. The first question is also about the first unit, so
    that a prefix of which nothing is present takes one round.

    Args:
        needs_all: every unit of a prefix is needed, so the first unit that is known to be missing ends the prefix. For
            windows, whose first units may be gone, the search goes on above the last present unit.
    """
    low, high = first, end
    while low < high:
        asked = sorted({low, *_dividing(low, high, rounds)} if low == first else _dividing(low, high, rounds))
        flags = yield asked
        assert flags is not None, "only the begin of a search has no answer"
        present = [unit for unit, is_present in zip(asked, flags, strict=True) if is_present]
        absent = [unit for unit, is_present in zip(asked, flags, strict=True) if not is_present]
        if needs_all:
            high = min(absent, default=high)
            present = [unit for unit in present if unit < high]
        low = max(present, default=low - 1) + 1
        high = min((unit for unit in absent if unit >= low), default=high)
        rounds -= 1
    return low


def questions(units: int, rounds: int) -> int:
    """Return the largest number of units that a search in ``units`` units asks about."""
    return min(units, rounds * (_root(units + 1, rounds) - 1) + 1)


def _dividing(low: int, high: int, rounds: int) -> list[int]:
    """Return units that divide the possible answers from ``low`` to ``high`` into parts of nearly equal size."""
    answers = high - low + 1
    parts = min(_root(answers, max(rounds, 1)), answers)
    return [low + -(-part * answers // parts) - 1 for part in range(1, parts)]


def _root(number: int, degree: int) -> int:
    """Return the smallest integer whose power ``degree`` is ``number`` or more."""
    root = max(1, round(math.pow(number, 1 / degree)) - 1)
    while root**degree < number:
        root += 1
    return root
