"""The tiers of a running engine at a glance, from its metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.samples import Sample

from offload_core.cli.metrics_text import by_tier
from offload_core.cli.output import human_bytes, human_milliseconds
from offload_core.runtime.metrics import ALL_TIERS, GAUGES

_COUNTS = (
    "queries", "query_hits", "query_misses", "hit_tokens", "load_bytes", "store_bytes", "evictions", "evictions_unread",
)  # fmt: skip
_GAUGES = ("pending_loads", "pending_stores", "breaker_open")
_CALLS = ("lookup", "load", "load_queue", "store", "store_queue")
FIGURES = (
    "use", "queries", "hit rate", "tokens served", "seconds saved", "loaded", "stored", "ms per load", "ms in queue",
    "pending loads", "pending stores", "evicted", "never read",
)  # fmt: skip
"""The names of :meth:`TierView.figures`."""


@dataclass(frozen=True)
class TierView:
    """The figures of one tier of one engine, since the engine's start or between two readings.

    Args:
        engine: the engine's number, as its metrics show it; empty if they show none.
        values: by the name of the metric; a missing one is 0.
    """

    engine: str
    tier: str
    values: Mapping[str, float]

    @property
    def name(self) -> str:
        """The tier's name, behind the number of an engine that is not the first."""
        return self.tier if self.engine in ("", "0") else f"{self.engine}/{self.tier}"

    def document(self) -> dict[str, object]:
        """Return the figures as a JSON object. A ratio or a mean of nothing is ``null``."""
        return {
            "engine": self.engine,
            "tier": self.tier,
            **{name: int(self._count(name)) for name in _COUNTS},
            "hit_rate": self._hit_rate,
            "unread_rate": self._unread_rate,
            "prefill_seconds_saved": self._count("prefill_seconds_saved"),
            **{name: int(self.values.get(name, 0.0)) for name in _GAUGES},
            **{f"mean_{call}_seconds": self._mean(call) for call in _CALLS},
        }

    def figures(self) -> list[str]:
        """Return the figures for a reader, one for each of :data:`FIGURES`."""
        return [
            f"paused ({paused:.0f})" if (paused := self.values.get("breaker_open", 0.0)) > 0 else "in use",
            f"{self._count('queries'):,.0f}",
            _percent(self._hit_rate),
            f"{self._count('hit_tokens'):,.0f}",
            f"{self._count('prefill_seconds_saved'):,.1f}",
            human_bytes(self._count("load_bytes")),
            human_bytes(self._count("store_bytes")),
            human_milliseconds(self._mean("load")),
            human_milliseconds(self._mean("load_queue")),
            f"{self.values.get('pending_loads', 0.0):.0f}",
            f"{self.values.get('pending_stores', 0.0):.0f}",
            f"{self._count('evictions'):,.0f}",
            _percent(self._unread_rate),
        ]

    def since(self, before: TierView | None) -> TierView:
        """Return the figures from an earlier view on; gauges are those of this view.

        After a restart of the engine, these are the figures since the restart.
        """
        if before is None or any(self.values.get(name, 0.0) < value for name, value in before._counts.items()):
            return self
        gone = {name: value - before.values.get(name, 0.0) for name, value in self._counts.items()}
        return TierView(self.engine, self.tier, {**self.values, **gone})

    @property
    def _counts(self) -> dict[str, float]:
        """The figures that only grow."""
        return {name: value for name, value in self.values.items() if name not in GAUGES and name[-8:] != "_created"}

    @property
    def _hit_rate(self) -> float | None:
        return _ratio(self._count("query_hits"), self._count("queries"))

    @property
    def _unread_rate(self) -> float | None:
        return _ratio(self._count("evictions_unread"), self._count("evictions"))

    def _count(self, counter: str) -> float:
        return self.values.get(f"{counter}_total", 0.0)

    def _mean(self, call: str) -> float | None:
        return _ratio(self.values.get(f"{call}_seconds_sum", 0.0), self.values.get(f"{call}_seconds_count", 0.0))


@dataclass(frozen=True)
class EngineView:
    """The figures of all tiers of all engines behind one address."""

    tiers: tuple[TierView, ...]
    taken_at: float
    """By the monotonic clock, in seconds."""

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> EngineView:
        """Return the view of metrics that were read just now."""
        tiers = (TierView(*place, values) for place, values in by_tier(samples).items() if place[1] != ALL_TIERS)
        return cls(tuple(tiers), time.monotonic())

    def since(self, before: EngineView) -> EngineView:
        """Return the figures from an earlier view on."""
        earlier = {(tier.engine, tier.tier): tier for tier in before.tiers}
        tiers = (tier.since(earlier.get((tier.engine, tier.tier))) for tier in self.tiers)
        return EngineView(tuple(tiers), self.taken_at)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.0%}"
