"""A running fit that recent observations of about the same size correct."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from offload_core.lookup.running_fit import HALF_LIFE_SECONDS, RunningFit

_SIZES_PER_DOUBLING = 4
_NEW_SHARE = 0.5
_MOST_TIMES_EXPECTED = 10.0


class _Alike(NamedTuple):
    """Observations whose features are about the same."""

    features: Sequence[float]
    seconds: float
    observed_at: float


class CorrectedFit:
    """A line through all observations, corrected by recent ones of about the same size.

    Real costs grow in stairs and curves: a load is several calls of which some run at once, and a processor is faster
    with large batches. Each time that a feature grows by a fifth, a new class of sizes begins. A minute after the last
    observation in a class, it counts as much as the line.

    Args:
        reluctance: see :class:`RunningFit`.
    """

    def __init__(self, reluctance: Sequence[float]) -> None:
        self._line = RunningFit(reluctance)
        self._classes: dict[tuple[int, ...], _Alike] = {}

    @property
    def observed_at(self) -> float | None:
        """The time of the last observation; ``None`` if there is none."""
        return self._line.observed_at

    def observe(self, features: Sequence[float], seconds: float, now: float) -> None:
        """Add an observation. One far above the expectation counts as ten times the expectation.

        Args:
            seconds: more than zero.
            now: by a monotonic clock.
        """
        before = self._classes.get(_size_class(features))
        seconds = min(seconds, _MOST_TIMES_EXPECTED * (self.seconds(features, now) or seconds))
        self._line.observe(features, seconds, now)
        if before is not None:
            old = (1 - _NEW_SHARE) * _weight(before, now)
            seconds += old * (self._scaled(before, features) - seconds)
        self._classes[_size_class(features)] = _Alike(features, seconds, now)

    def seconds(self, features: Sequence[float], now: float) -> float:
        """Return the expected seconds; zero before the first observation."""
        line = self._line.seconds(features)
        alike = self._classes.get(_size_class(features))
        return line if alike is None else line + _weight(alike, now) * (self._scaled(alike, features) - line)

    def _scaled(self, alike: _Alike, features: Sequence[float]) -> float:
        """Return the seconds of a class, for features that are not quite its own."""
        line = self._line.seconds(alike.features)
        return alike.seconds * self._line.seconds(features) / line if line > 0 else alike.seconds


def _size_class(features: Sequence[float]) -> tuple[int, ...]:
    return tuple(round(_SIZES_PER_DOUBLING * math.log2(max(1.0, feature))) for feature in features)


def _weight(alike: _Alike, now: float) -> float:
    return math.pow(0.5, (now - alike.observed_at) / HALF_LIFE_SECONDS)
