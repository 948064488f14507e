"""The connector's counts as vLLM statistics and as Prometheus metrics (``vllm:hybrid_offload_…``)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from offload_core.runtime.metrics import ALL_TIERS, BUCKET_SECONDS, COUNTERS, GAUGES, HISTOGRAMS, single_values

_SEPARATOR = "|"


@dataclass
class HybridOffloadStats(KVConnectorStats):
    """Counts, changes of gauges, and histograms, since the last report.

    ``data`` is ``{"counter|tier": count}``, which survives vLLM's serialisation. A histogram has several counts, as
    :class:`offload_core.runtime.metrics.Counters` names them.
    """

    @classmethod
    def from_counts(cls, counts: dict[tuple[str, str], float]) -> HybridOffloadStats:
        """Return statistics from counts that :class:`offload_core.runtime.metrics.Counters` has handed over."""
        return cls({_SEPARATOR.join(key): count for key, count in counts.items()})

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget all counts."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another report's counts to this one's."""
        for key, count in other.data.items():
            self.data[key] = self.data.get(key, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts for vLLM's periodic log line, without those of histograms."""
        return {key: count for key, count in self.data.items() if ":" not in key.split(_SEPARATOR, 1)[0]}

    def is_empty(self) -> bool:
        """Return whether there are no counts."""
        return not self.data


class HybridOffloadPromMetrics(KVConnectorPromMetrics):
    """A Prometheus metric by tier per entry of the tables of :mod:`offload_core.runtime.metrics`."""

    prefix: ClassVar[str] = "vllm:hybrid_offload_"
    label: ClassVar[str] = "tier"
    counters: ClassVar[Mapping[str, str]] = COUNTERS
    gauges: ClassVar[Mapping[str, str]] = GAUGES
    histograms: ClassVar[Mapping[str, str]] = HISTOGRAMS

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        # Each report goes to one of the API servers, so a gauge is the sum of the changes that all of them got.
        gauge = partial(self._gauge_cls, multiprocess_mode="sum")
        self._metrics = {
            name: metric(
                name=f"{self.prefix}{name}",
                documentation=f"offload-core: {text}.",
                labelnames=[*labelnames, self.label],
            )
            for metric, table in ((self._counter_cls, self.counters), (gauge, self.gauges))
            for name, text in table.items()
        }
        for name, text in self.histograms.items():
            self._metrics[name] = self._histogram_cls(
                name=f"{self.prefix}{name}",
                documentation=f"offload-core: {text}.",
                buckets=BUCKET_SECONDS,
                labelnames=[*labelnames, self.label],
            )
        self._sums: defaultdict[tuple[int, str, str], float] = defaultdict(float)
        """The value of each gauge. Ray's gauges, unlike Prometheus', can only be set."""
        self._tiers: set[tuple[int, str]] = set()
        """The tiers of each engine that have all metrics."""

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report's counts; counts of gauges may be negative."""
        counts: dict[tuple[str, str], float] = {}
        for key, count in transfer_stats_data.items():
            name, _, tier = key.partition(_SEPARATOR)
            counts[name, tier] = count
            self._show_tier(engine_idx, tier)
        for (name, tier), count in counts.items():
            if name in self.gauges:
                self._sums[engine_idx, name, tier] += count
                self._labelled(name, tier, engine_idx).set(self._sums[engine_idx, name, tier])
            elif name in self._metrics:  # else a part of a histogram
                self._labelled(name, tier, engine_idx).inc(count)
        for name, tier, value in single_values(counts):
            self._labelled(name, tier, engine_idx).observe(value)

    def _labelled(self, name: str, tier: str, engine_idx: int) -> Any:
        return self._metrics[name].labels(*self.per_engine_labelvalues[engine_idx], tier)

    def _show_tier(self, engine_idx: int, tier: str) -> None:
        """Show all metrics of a tier from its first count on. Else Prometheus would miss the first count of each."""
        if (engine_idx, tier) not in self._tiers and tier != ALL_TIERS:
            for name in self._metrics:
                self._labelled(name, tier, engine_idx)
        self._tiers.add((engine_idx, tier))
