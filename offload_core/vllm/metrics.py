"""The connector's counters and gauges as vLLM statistics and Prometheus metrics (``vllm:hybrid_offload_…``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from offload_core.runtime.metrics import COUNTERS, GAUGES

_SEPARATOR = "|"


@dataclass
class HybridOffloadStats(KVConnectorStats):
    """Counts, and changes of gauges, since the last report.

    ``data`` is ``{"counter|tier": count}``, which survives vLLM's serialisation.
    """

    @classmethod
    def from_counts(cls, counts: dict[tuple[str, str], float]) -> HybridOffloadStats:
        """Return statistics from the counts of :meth:`offload_core.runtime.metrics.Counters.take`."""
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
        """Return the counts for vLLM's periodic log line."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Return whether there are no counts."""
        return not self.data


class HybridOffloadPromMetrics(KVConnectorPromMetrics):
    """A Prometheus counter or gauge per entry of the tables of :mod:`offload_core.runtime.metrics`, by tier."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            name: metric(
                name=f"vllm:hybrid_offload_{name}",
                documentation=f"offload-core: {text}.",
                labelnames=[*labelnames, "tier"],
            )
            for metric, table in ((self._counter_cls, COUNTERS), (self._gauge_cls, GAUGES))
            for name, text in table.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report's counts; counts of gauges may be negative."""
        for key, count in transfer_stats_data.items():
            name, tier = key.split(_SEPARATOR, 1)
            self._metrics[name].labels(*self.per_engine_labelvalues[engine_idx], tier).inc(count)
