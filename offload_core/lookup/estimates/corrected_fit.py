"""A running fit that recent observations of about the same size correct."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from offload_core.lookup.estimates.running_fit import MOST_TIMES_EXPECTED, RunningFit

_SIZES_PER_DOUBLING = 4
_SHARE_OF_FASTER = 0.8
_SHARE_OF_SLOWER = 0.3


class _Alike(NamedTuple):
    """Observations whose features are about the same."""

    features: Sequence[float]
    seconds: float
    observed_at: float


class CorrectedFit:
    """A line through all observations, corrected by recent ones of about the same size.

    Real costs grow in stairs and curves: some calls of a load run at once, and processors are faster with large
    batches. Each time that a feature grows by a fifth, a new class of sizes begins. When a class has had no
    observation for its half-life, it counts as much as the line.

    A new observation counts more if it is faster than expected. A first use of memory or a busy machine makes some
    slower, and nothing makes one faster than it can be.

    Args:
        reluctance: see :class:`RunningFit`.
        half_life_seconds: of a class.
    """

    def __init__(self, reluctance: Sequence[float], half_life_seconds: float) -> None:
        self._half_life_seconds = half_life_seconds
        self._line = RunningFit(reluctance)
        self._classes: dict[tuple[int, ...], _Alike] = {}

    @property
    def observed_at(self) -> float | None:
        """The time of the last observation; ``None`` if there is none."""
        return self._line.observed_at

    def observe(self, features: Sequence[float], seconds: float, now: float) -> None:
        """Add an observation. In its class, it counts as ten times the expectation at most.

        Args:
            seconds: more than zero.
            now: by a monotonic clock.
        """
        before = self._classes.get(_size_class(features))
        limit = MOST_TIMES_EXPECTED * (self.seconds(features, now) or seconds)
        self._line.observe(features, seconds, now)
        seconds = min(seconds, limit)
        if before is not None:
            expected = self._scaled(before, features)
            share = _SHARE_OF_FASTER if seconds < expected else _SHARE_OF_SLOWER
            seconds += (1 - share) * self._weight(before, now) * (expected - seconds)
        self._classes[_size_class(features)] = _Alike(features, seconds, now)

    def seconds(self, features: Sequence[float], now: float) -> float:
        """Return the expected seconds; zero before the first observation."""
        line = self._line.seconds(features)
        alike = self._classes.get(_size_class(features))
        return line if alike is None else line + self._weight(alike, now) * (self._scaled(alike, features) - line)

    def _weight(self, alike: _Alike, now: float) -> float:
        return math.pow(0.5, (now - alike.observed_at) / self._half_life_seconds)

    def _scaled(self, alike: _Alike, features: Sequence[float]) -> float:
        """Return the seconds of a class, for features that are not quite its own."""
        line = self._line.seconds(alike.features)
        return alike.seconds * self._line.seconds(features) / line if line > 0 else alike.seconds


def _size_class(features: Sequence[float]) -> tuple[int, ...]:
    return tuple(round(_SIZES_PER_DOUBLING * math.log2(max(1.0, feature))) for feature in features)
