"""Running estimate of the engine's seconds to compute tokens of a prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from offload_core.lookup.running_fit import RunningFit

MIN_PREFILL_TOKENS = 16
"""Tokens of one request in one step from which on the step counts as a prefill."""
_MIN_SECONDS = 1e-6
_RECENT_SECONDS = 10.0
_ABOUT = 0.05
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
        self._fit = RunningFit(_TOKENS_FIRST)

    def observe(self, parts: Iterable[tuple[int, int]], seconds: float) -> None:
        """Add one step of the engine. A step without a prefill says nothing about prefills, and is left out.

        A step that took about as long as expected is left out too, unless the last one added was long ago. It would
        change little, and adding it takes the engine's time.

        Args:
            parts: per request in the step, the tokens before it and the tokens that it computed.
            seconds: duration of the step.
        """
        parts = list(parts)
        if max((tokens for _, tokens in parts), default=0) >= MIN_PREFILL_TOKENS:
            attention = sum(_pairs(before, before + tokens) for before, tokens in parts)
            features = (1.0, sum(tokens for _, tokens in parts), attention)
            now, seconds = self._clock(), max(_MIN_SECONDS, seconds)
            observed_at, expected = self._fit.observed_at, self._fit.seconds(features)
            recent = observed_at is not None and now - observed_at < _RECENT_SECONDS
            if not (recent and abs(seconds - expected) < _ABOUT * expected):
                self._fit.observe(features, seconds, now)

    def seconds(self, computed_tokens: int, tokens: int) -> float | None:
        """Return the expected seconds to compute a prompt of ``tokens`` from ``computed_tokens`` on.

        It is ``None`` before the first observation.
        """
        if self._fit.observed_at is None:
            return None
        steps = -(-(tokens - computed_tokens) // self._step_tokens)
        return self._fit.seconds((steps, tokens - computed_tokens, _pairs(computed_tokens, tokens)))


def _pairs(start: int, stop: int) -> float:
    """Return the number of pairs of a token in ``[start, stop)`` and a token before it, about."""
    return (stop * stop - start * start) / 2
