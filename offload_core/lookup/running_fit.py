"""A linear function that follows measured seconds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

_KEPT_PER_OBSERVATION = 0.9
_HALF_LIFE_SECONDS = 60.0
_MOST_TIMES_EXPECTED = 10.0
_KEPT_AS_OLD = 0.5


class RunningFit:
    """Least squares over recent observations: seconds as a sum of features, each times a coefficient of at least zero.

    An observation counts by its relative error, so that short and long ones matter alike. Each later observation takes
    10 % of its weight, and each minute half of it. One that follows others closely counts as ten times the expectation
    at most, so that a single stall does not outweigh them.

    Args:
        reluctance: one positive number per feature. It matters only where the observations leave a choice. If a single
            observation could be explained by two features, the one with the lower number explains more of it.
    """

    def __init__(self, reluctance: Sequence[float]) -> None:
        self._reluctance = np.array(reluctance)
        size = len(self._reluctance)
        self._products = np.zeros((size, size))
        self._targets = np.zeros(size)
        self._coefficients: npt.NDArray[np.float64] | None = None
        self._observed_at = 0.0

    @property
    def observed_at(self) -> float | None:
        """The time of the last observation; ``None`` if there is none."""
        return None if self._coefficients is None else self._observed_at

    def observe(self, features: Sequence[float], seconds: float, now: float) -> None:
        """Add an observation.

        Args:
            seconds: more than zero.
            now: by a monotonic clock.
        """
        expected = seconds
        if self._coefficients is not None:
            kept = _KEPT_PER_OBSERVATION * 0.5 ** ((now - self._observed_at) / _HALF_LIFE_SECONDS)
            expected = self.seconds(features) or seconds
            if kept > _KEPT_AS_OLD:
                seconds = min(seconds, _MOST_TIMES_EXPECTED * expected)
            self._scale(kept)
        weight = 1 / (expected * min(expected, seconds))
        self._targets += weight * seconds * np.array(features)
        self._products += weight * np.outer(features, features)
        self._observed_at = now
        self._coefficients = self._solve()
        if (growth := self.seconds(features) / expected) > 1:
            self._scale(growth**-2)  # errors are relative to the expectation, so earlier ones have become smaller

    def seconds(self, features: Sequence[float]) -> float:
        """Return the expected seconds; zero before the first observation."""
        return 0.0 if self._coefficients is None else float(self._coefficients @ features)

    def _scale(self, factor: float) -> None:
        """Multiply the weight of all observations."""
        self._targets *= factor
        self._products *= factor

    def _solve(self) -> npt.NDArray[np.float64]:
        """Return the coefficients with the least squared error among all with none below zero.

        At the optimum some features are zero and the others solve the equations without them. So each choice of
        features is tried; there are at most eight. The features are scaled to one size, so that no choice is singular.
        """
        sizes = np.sqrt(np.diag(self._products))
        usable = np.flatnonzero(sizes)
        sizes[sizes == 0] = 1.0
        matrix = self._products / np.outer(sizes, sizes) + np.diag(self._reluctance)
        targets = self._targets / sizes
        best: npt.NDArray[np.float64] = np.zeros_like(targets)
        least = 0.0
        for count in range(1, len(usable) + 1):
            for chosen in map(list, combinations(usable, count)):
                solution = np.linalg.solve(matrix[np.ix_(chosen, chosen)], targets[chosen])
                error = -float(targets[chosen] @ solution)  # up to a constant
                if solution.min() >= 0 and error < least:
                    best, least = np.zeros_like(targets), error
                    best[chosen] = solution / sizes[chosen]
        return best
