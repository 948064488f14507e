"""Advice on the capacity of a tier, from the live curve that its engine shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from prometheus_client.samples import Sample

from offload_core.cli.metrics_text import by_tier
from offload_core.cli.output import human_bytes
from offload_core.runtime.metrics import HIT_RATIO_GAUGES

WORTH = 0.03
"""The least gain in the hit ratio to speak for another capacity. Estimates differ by up to this from a simulation."""
FEW = 0.02
"""Up to this hit ratio at each capacity, prompts hardly share prefixes."""


@dataclass(frozen=True)
class TierCurve:
    """The estimates of one tier of one engine.

    Args:
        engine: the engine's number, as its metrics show it; empty if they show none.
        ratios: hit tokens per prompt token at half, one, two and four times the capacity; NaN for an unknown one.
        prompt_tokens: tokens of the prompts behind the estimates.
    """

    engine: str
    tier: str
    capacity_bytes: float
    ratios: tuple[float, float, float, float]
    prompt_tokens: float

    @property
    def title(self) -> str:
        """The name of the tier, with the number of an engine that is not the first."""
        return f"tier {self.tier}" + (f" of engine {self.engine}" if self.engine not in ("", "0") else "")

    @property
    def estimates(self) -> str:
        """The estimates, as sentences."""
        half, same, twice, four = map(_share, self.ratios)
        return (
            f"At {human_bytes(self.capacity_bytes)}, {same} of the prompt tokens can be hits. With half the capacity "
            f"it would be {half}, with twice {twice}, with four times {four}."
        )

    @cached_property
    def advice(self) -> str:
        """A recommendation, as a sentence."""
        half, same, twice, four = self.ratios
        if not self.prompt_tokens:
            return "No prompt has ended so far. Ask again later."
        if math.isnan(same):
            return "The engine serves too many different prompts for an estimate; use offload-core simulate."
        if twice - same >= WORTH:
            return f"More capacity pays: twice as much brings {_points(twice - same)} more."
        if math.isnan(twice) or math.isnan(four):
            return "The hits with more capacity are unknown; use offload-core simulate."
        if four - same >= WORTH:
            return f"Twice the capacity brings little, but four times as much brings {_points(four - same)} more."
        if max(same, twice, four) <= FEW:
            return "The prompts share few prefixes, so no capacity brings many hits."
        if math.isnan(half):
            return "More capacity brings little. The hits with less are unknown; use offload-core simulate."
        if same - half < WORTH / 3:
            return "Half the capacity would do."
        return "The capacity fits: more brings little, and less costs hits."

    def document(self) -> dict[str, object]:
        """Return the curve as a JSON object."""
        names = ("half", "same", "twice", "four_times")
        shown = [None if math.isnan(ratio) else round(ratio, 4) for ratio in self.ratios]
        return {
            "engine": self.engine,
            "tier": self.tier,
            "capacity_bytes": int(self.capacity_bytes),
            "prompt_tokens": int(self.prompt_tokens),
            "estimated_hit_ratio": dict(zip(names, shown, strict=True)),
            "advice": self.advice,
        }


def curves(samples: Iterable[Sample]) -> list[TierCurve]:
    """Return the live curves among the metrics of an engine, by engine and tier."""
    return list(_curves(by_tier(samples)))


def _curves(found: dict[tuple[str, str], dict[str, float]]) -> Iterator[TierCurve]:
    for (engine, tier), values in found.items():
        if values.get("capacity_bytes"):
            half, same, twice, four = (values.get(gauge, 0.0) for gauge in HIT_RATIO_GAUGES)
            tokens = values.get("estimated_prompt_tokens_total", 0.0)
            yield TierCurve(engine, tier, values["capacity_bytes"], (half, same, twice, four), tokens)


MeasuredHits = tuple[float, float] | None
"""Hits per prompt token in vLLM's own cache, and from all connectors; ``None`` if vLLM has counted no tokens."""


def hits_document(measured: MeasuredHits) -> dict[str, float | None]:
    """Return the hits that vLLM has counted as a JSON object."""
    own, external = measured or (None, None)
    return {"own_hit_ratio": own, "external_hit_ratio": external}


def measured_hits(samples: Iterable[Sample]) -> MeasuredHits:
    """Return the hits per prompt token that vLLM has counted, as shares of all prompt tokens of all engines."""
    totals: dict[str, float] = {}
    for name, _, value, *_ in samples:
        totals[name] = totals.get(name, 0.0) + value
    asked = totals.get("vllm:prefix_cache_queries_total", 0.0)
    if not asked:
        return None
    own, external = (totals.get(f"vllm:{kind}prefix_cache_hits_total", 0.0) for kind in ("", "external_"))
    return own / asked, external / asked


def _share(ratio: float) -> str:
    return "an unknown part" if math.isnan(ratio) else f"{ratio:.0%}"


def _points(gain: float) -> str:
    return f"about {100 * gain:.0f} points"
