"""The comparison of answers that were computed, came from the local prefix cache, or came from a tier."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from offload_core.cli.proof.documents import Answer

SPREAD_FACTOR = 2.0
PRECISION_FACTOR = 8.0
LEAST_ALLOWED = 1e-4


@dataclass(frozen=True)
class Difference:
    """The difference between two runs of the same prompts.

    Args:
        gap: the largest difference of log probabilities, up to the first other token of each prompt; infinite if a
            number is missing or is none.
        other_tokens: prompts whose tokens differ.
        margin: the largest margin, in log probability, by which a run preferred a token that the other did not choose.
    """

    gap: float = 0.0
    other_tokens: int = 0
    margin: float = 0.0

    def within(self, allowed: float) -> bool:
        """Return whether nothing differs by more than ``allowed``: the tokens only at near ties."""
        return self.gap <= allowed and self.margin <= allowed

    @property
    def size(self) -> float:
        """The larger of both numbers."""
        return max(self.gap, self.margin)


def difference(first: Sequence[Answer], second: Sequence[Answer]) -> Difference:
    """Compare the answers to the same prompts."""
    gap = margin = 0.0
    other_tokens = 0
    for one, two in zip(first, second, strict=True):
        other_tokens += one.tokens != two.tokens
        if len(one.tokens) != len(two.tokens):
            return Difference(math.inf, other_tokens, math.inf)
        places = zip(one.tokens, two.tokens, one.logprobs, two.logprobs, strict=True)
        for token, other, scores, other_scores in places:
            gap = max(gap, _gap(scores, other_scores, token), _gap(scores, other_scores, other))
            if token != other:  # from here on, the runs continue different texts
                margin = max(margin, _gap(scores, {other: scores[token]}, other))
                break
    return Difference(gap, other_tokens, margin)


def _gap(scores: dict[int, float], others: dict[int, float], token: int) -> float:
    gap = abs(scores.get(token, math.nan) - others.get(token, math.nan))
    return math.inf if math.isnan(gap) else gap


def allowed_gap(spread: Difference, precision: float) -> float:
    """Return the largest difference that rounding explains.

    Args:
        spread: the measured difference between two computations in batches of other compositions.
        precision: of the model's dtype.
    """
    floor = max(LEAST_ALLOWED, PRECISION_FACTOR * precision)
    return max(floor, SPREAD_FACTOR * spread.size) if math.isfinite(spread.size) else floor


@dataclass(frozen=True)
class TierVerdict:
    """The verdict on one tier.

    Args:
        fault: ``none``, ``tier``, ``vllm`` or ``undecided``.
        text: a sentence for people.
    """

    tier: str
    fault: str
    text: str
    tier_tokens: int = 0
    from_computed: Difference | None = None
    from_local: Difference | None = None


def judge(
    tier: str, computed: Sequence[Answer], local: Sequence[Answer], loaded: Sequence[Answer], allowed: float
) -> TierVerdict:
    """Decide whether a tier's answers are those of computing, and if not, whose fault it is."""
    tokens = sum(answer.tier_tokens for answer in loaded)
    if not tokens:
        return TierVerdict(tier, "tier", f"nothing was served from tier {tier!r}")
    from_computed, from_local = difference(computed, loaded), difference(local, loaded)
    fault, text = "none", f"tier {tier!r} gives the answers of computing"
    if from_computed.within(allowed):
        if from_computed.other_tokens:
            text += f"; {from_computed.other_tokens} differ at a near tie of two tokens"
    else:
        size = f"{from_computed.size:.3g} (allowed {allowed:.3g})"
        if difference(computed, local).within(allowed):
            served = any(answer.local_tokens for answer in local)
            cache = "does not" if served else "served nothing to compare with"
            fault = "tier"
            text = f"tier {tier!r} differs from computing by {size}, and vLLM's local prefix cache {cache}"
        elif from_local.within(allowed):
            fault = "vllm"
            text = f"tier {tier!r} differs from computing by {size}, just as vLLM's local prefix cache does"
        else:
            fault = "undecided"
            text = (
                f"tier {tier!r} differs from computing by {size}, and from vLLM's local prefix cache by "
                f"{from_local.size:.3g}; vLLM's own cache differs from computing too, so the fault is undecided"
            )
    return TierVerdict(tier, fault, text, tokens, from_computed, from_local)
