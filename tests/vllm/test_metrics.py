"""Counters and gauges as vLLM shows them: the reports of halves and ranks add up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from offload_core.runtime.metrics import COUNTERS, GAUGES
from offload_core.vllm.metrics import HybridOffloadPromMetrics, HybridOffloadStats


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def shown(registry: CollectorRegistry) -> HybridOffloadPromMetrics:
    def registered(metric: Any) -> Any:
        return lambda **fields: metric(**fields, registry=registry)

    types = {metric: registered(metric) for metric in (Counter, Gauge, Histogram)}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    return HybridOffloadPromMetrics(config, types, ["engine"], {0: ["0"]})


def value(registry: CollectorRegistry, name: str, tier: str) -> float | None:
    return registry.get_sample_value(f"vllm:hybrid_offload_{name}", {"engine": "0", "tier": tier})


def test_gauges_go_up_and_down_and_counters_up(shown: HybridOffloadPromMetrics, registry: CollectorRegistry) -> None:
    scheduler = HybridOffloadStats.from_counts({("breaker_open", "nvme"): 1, ("breaker_opened", "nvme"): 1})
    for _ in range(2):  # two ranks
        scheduler.aggregate(HybridOffloadStats.from_counts({("breaker_open", "nvme"): 1, ("stuck_threads", "ram"): 3}))
    shown.observe(scheduler.data)
    assert value(registry, "breaker_open", "nvme") == 3
    assert value(registry, "stuck_threads", "ram") == 6
    assert value(registry, "breaker_opened_total", "nvme") == 1
    for change, left in ((-1, 2), (-2, 0)):
        shown.observe(HybridOffloadStats.from_counts({("breaker_open", "nvme"): change}).data)
        assert value(registry, "breaker_open", "nvme") == left


def test_every_name_is_shown_once_with_its_kind(shown: HybridOffloadPromMetrics, registry: CollectorRegistry) -> None:
    shown.observe({f"{name}|t": 1 for name in (*COUNTERS, *GAUGES)})
    kinds = {metric.name: metric.type for metric in registry.collect()}
    assert kinds == {f"vllm:hybrid_offload_{name}": "counter" for name in COUNTERS} | {
        f"vllm:hybrid_offload_{name}": "gauge" for name in GAUGES
    }
