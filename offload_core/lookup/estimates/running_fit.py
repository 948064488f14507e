"""A linear function that follows measured seconds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from operator import mul

import numpy as np

_KEPT_PER_OBSERVATION = 0.9
_HALF_LIFE_SECONDS = 60.0
MOST_TIMES_EXPECTED = 10.0
"""An observation counts as so many times the expectation at most, if it follows others closely."""
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
        size = len(reluctance)
        self._reluctance = np.diag(reluctance)
        self._choices = np.array(list(product((False, True), repeat=size)))
        self._products = np.zeros((size, size))
        self._targets = np.zeros(size)
        self._coefficients: tuple[float, ...] | None = None
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
                seconds = min(seconds, MOST_TIMES_EXPECTED * expected)
            self._scale(kept)
        weighted = np.array(features) / (expected * min(expected, seconds))
        self._targets += weighted * seconds
        self._products += weighted[:, None] * features
        self._observed_at = now
        self._coefficients = self._solve()
        if (growth := self.seconds(features) / expected) > 1:
            self._scale(growth**-2)  # errors are relative to the expectation, so earlier ones have become smaller

    def seconds(self, features: Sequence[float]) -> float:
        """Return the expected seconds; zero before the first observation."""
        return 0.0 if self._coefficients is None else sum(map(mul, self._coefficients, features))

    def _scale(self, factor: float) -> None:
        """Multiply the weight of all observations."""
        self._targets *= factor
        self._products *= factor

    def _solve(self) -> tuple[float, ...]:
        """Return the coefficients with the least squared error among all with none below zero.

        Usually these are the best ones of all. Else some features are zero at the optimum, and the others solve the
        equations without them: each choice of features is tried, all in one call. The features are scaled to one size,
        so that no choice is singular.
        """
        scales = self._products.diagonal() ** 0.5
        scales[scales == 0] = 1.0
        matrix = self._products / (scales[:, None] * scales) + self._reluctance
        targets = self._targets / scales
        best = np.linalg.solve(matrix, targets)
        if best.min() < 0:
            chosen = self._choices * targets
            both = self._choices[:, :, None] & self._choices[:, None, :]
            solutions = np.linalg.solve(np.where(both, matrix, np.eye(len(scales))), chosen[:, :, None])[:, :, 0]
            errors = -(chosen * solutions).sum(axis=1)  # up to a constant
            errors[solutions.min(axis=1) < 0] = np.inf
            best = solutions[errors.argmin()]
        return tuple((best / scales).tolist())
