"""Running estimate of the engine's seconds to compute tokens of a prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from offload_core.lookup.estimates.corrected_fit import CorrectedFit

MIN_PREFILL_TOKENS = 16
"""Tokens of one request in one step from which on the step counts as a prefill."""
_MIN_SECONDS = 1e-6
_HALF_LIFE_SECONDS = 600.0
_TOLERANCE = 0.05
_ADD_ONE_OF = 8
_MAX_PARTS = 16
"""A longer prompt than so many steps is estimated in parts of several equal steps, to take little time."""
_TOKENS_FIRST = (1e-2, 1e-4, 1e-2)


class PrefillSeconds:
    """Seconds per step, per token, and per token and token before it (attention), from the engine's own steps.

    Args:
        step_tokens: most tokens that the engine computes in one step.
        clock: monotonic seconds.
    """

    def __init__(self, step_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._step_tokens = step_tokens
        self._clock = clock
        self._fit = CorrectedFit(_TOKENS_FIRST, half_life_seconds=_HALF_LIFE_SECONDS)
        self._as_expected = 0

    def observe(self, parts: Iterable[tuple[int, int]], seconds: float) -> None:
        """Add one step of the engine. A step without a prefill says nothing about prefills, and is left out.

        Of steps that took about as long as expected, one in eight is added. The others would change little, and adding
        them would take the engine's time.

        Args:
            parts: per request in the step, the tokens before it and the tokens that it computed.
            seconds: duration of the step.
        """
        parts = list(parts)
        if max((tokens for _, tokens in parts), default=0) >= MIN_PREFILL_TOKENS:
            attention = sum(_pairs(before, before + tokens) for before, tokens in parts)
            features = (1.0, sum(tokens for _, tokens in parts), attention)
            now, seconds = self._clock(), max(_MIN_SECONDS, seconds)
            expected = self._fit.seconds(features, now)
            as_expected = abs(seconds - expected) < _TOLERANCE * expected
            self._as_expected = (self._as_expected + as_expected) % _ADD_ONE_OF
            if not (as_expected and self._as_expected):
                self._fit.observe(features, seconds, now)

    def seconds(self, computed_tokens: int, tokens: int) -> float | None:
        """Return the expected seconds to compute a prompt of ``tokens`` from ``computed_tokens`` on.

        It is ``None`` before the first observation.
        """
        if self._fit.observed_at is None:
            return None
        now, seconds = self._clock(), 0.0
        steps = -(-(tokens - computed_tokens) // self._step_tokens)
        part_tokens = self._step_tokens * max(1, -(-steps // _MAX_PARTS))
        for start in range(computed_tokens, tokens, part_tokens):
            stop = min(start + part_tokens, tokens)
            count = -(-(stop - start) // self._step_tokens)
            seconds += count * self._fit.seconds((1.0, (stop - start) / count, _pairs(start, stop) / count), now)
        return seconds


def _pairs(start: int, stop: int) -> float:
    """Return the number of pairs of a token in ``[start, stop)`` and a token before it, about."""
    return (stop * stop - start * start) / 2
