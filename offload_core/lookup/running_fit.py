"""A linear function that follows measured seconds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

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
        self._reluctance = tuple(reluctance)
        size = len(self._reluctance)
        self._products = [[0.0] * size for _ in range(size)]
        self._targets = [0.0] * size
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
                seconds = min(seconds, _MOST_TIMES_EXPECTED * expected)
            self._scale(kept)
        weight = 1 / (expected * min(expected, seconds))
        for row, x in enumerate(features):
            self._targets[row] += weight * x * seconds
            for column, y in enumerate(features):
                self._products[row][column] += weight * x * y
        self._observed_at = now
        self._coefficients = self._solve()
        if (growth := self.seconds(features) / expected) > 1:
            self._scale(growth**-2)  # errors are relative to the expectation, so earlier ones have become smaller

    def seconds(self, features: Sequence[float]) -> float:
        """Return the expected seconds; zero before the first observation."""
        if self._coefficients is None:
            return 0.0
        return sum(c * x for c, x in zip(self._coefficients, features, strict=True))

    def _scale(self, factor: float) -> None:
        """Multiply the weight of all observations."""
        self._targets = [factor * target for target in self._targets]
        self._products = [[factor * product for product in row] for row in self._products]

    def _solve(self) -> tuple[float, ...]:
        """Return the coefficients with the least squared error among all with none below zero.

        At the optimum some features are zero and the others solve the equations without them. So each choice of
        features is tried; there are at most eight.
        """
        size = len(self._targets)
        matrix = [
            [self._products[i][j] * (1 + self._reluctance[i] * (i == j)) for j in range(size)] for i in range(size)
        ]
        best, least = (0.0,) * size, 0.0
        for chosen in product((False, True), repeat=size):
            used = [index for index in range(size) if chosen[index] and matrix[index][index] > 0]
            solution = _solution([[matrix[i][j] for j in used] for i in used], [self._targets[i] for i in used])
            if min(solution, default=0.0) < 0:
                continue
            error = -sum(self._targets[i] * x for i, x in zip(used, solution, strict=True))  # up to a constant
            if error < least:
                values = dict(zip(used, solution, strict=True))
                best, least = tuple(values.get(index, 0.0) for index in range(size)), error
        return best


def _solution(matrix: list[list[float]], targets: list[float]) -> list[float]:
    """Solve a positive definite system by elimination."""
    size = len(targets)
    for pivot in range(size):
        for row in range(pivot + 1, size):
            factor = matrix[row][pivot] / matrix[pivot][pivot]
            matrix[row] = [x - factor * y for x, y in zip(matrix[row], matrix[pivot], strict=True)]
            targets[row] -= factor * targets[pivot]
    solution = [0.0] * size
    for row in reversed(range(size)):
        known = sum(matrix[row][column] * solution[column] for column in range(row + 1, size))
        solution[row] = (targets[row] - known) / matrix[row][row]
    return solution
