"""The counts of each connector as vLLM statistics and as Prometheus metrics (``vllm:weighted_multi_…``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorPromMetrics

from offload_core.runtime.metrics import CONNECTOR_COUNTERS, CONNECTOR_GAUGES
from offload_core.vllm.metrics import HybridOffloadPromMetrics

OWN_STATS = "by connector"
"""The key of our own counts beside the statistics of the connectors, whose keys are names of classes."""


class ConnectorPromMetrics(HybridOffloadPromMetrics):
    """A Prometheus metric by connector for each count of the choice."""

    prefix: ClassVar[str] = "vllm:weighted_multi_"
    label: ClassVar[str] = "connector"
    counters: ClassVar[Mapping[str, str]] = CONNECTOR_COUNTERS
    gauges: ClassVar[Mapping[str, str]] = CONNECTOR_GAUGES
    histograms: ClassVar[Mapping[str, str]] = {}


class WeightedMultiPromMetrics(MultiKVConnectorPromMetrics):
    """The metrics of all connectors and our own. Statistics of a connector without metrics are left out."""

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Pass each connector's report to its metrics."""
        shown = {name: data for name, data in transfer_stats_data.items() if name in self._prom_metrics}
        super().observe(shown, engine_idx)
