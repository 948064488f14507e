"""Counters and gauges as vLLM shows them: the reports of halves and ranks add up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.multiprocess import MultiProcessCollector

from offload_core.runtime.metrics import BUCKET_SECONDS, COUNTERS, GAUGES, HISTOGRAMS, Counters
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


class OnlySet:
    """A gauge as vLLM's metrics for Ray have it: its value can only be set."""

    def __init__(self, **fields: Any) -> None:
        self.values: dict[tuple[object, ...], float] = {}
        self.labelvalues: tuple[object, ...] = ()

    def labels(self, *values: object) -> OnlySet:
        self.labelvalues = values
        return self

    def set(self, value: float) -> None:
        self.values[self.labelvalues] = value


def test_a_gauge_that_can_only_be_set_has_the_sum_of_the_changes(registry: CollectorRegistry) -> None:
    gauges: dict[str, OnlySet] = {}

    def gauge(**fields: Any) -> OnlySet:
        return gauges.setdefault(fields["name"].removeprefix("vllm:hybrid_offload_"), OnlySet(**fields))

    def registered(metric: Any) -> Any:
        return lambda **fields: metric(**fields, registry=registry)

    config: Any = SimpleNamespace(kv_transfer_config=None)
    types: dict[Any, Any] = {Gauge: gauge, Counter: registered(Counter), Histogram: registered(Histogram)}
    metrics = HybridOffloadPromMetrics(config, types, ["engine"], {0: ["0"], 1: ["1"]})
    for tier, change in (("nvme", 2.0), ("nvme", -1.0), ("ram", 5.0)):
        metrics.observe({f"pending_loads|{tier}": change}, 0)
    metrics.observe({"pending_loads|nvme": 7.0}, 1)
    assert gauges["pending_loads"].values == {("0", "nvme"): 1.0, ("0", "ram"): 5.0, ("1", "nvme"): 7.0}


API_SERVERS = """
import os
import sys
from types import SimpleNamespace

from prometheus_client import Counter, Gauge, Histogram

from offload_core.vllm.metrics import HybridOffloadPromMetrics

for changes in sys.argv[1:]:
    if server := os.fork():
        os.waitpid(server, 0)
        continue
    types = {metric: metric for metric in (Counter, Gauge, Histogram)}
    metrics = HybridOffloadPromMetrics(SimpleNamespace(kv_transfer_config=None), types, ["engine"], {0: ["0"]})
    for change in changes.split():
        metrics.observe({"pending_loads|nvme": float(change), "stores|nvme": 1})
    os._exit(0)
"""
"""A process per argument, as vLLM's API servers are. Each shows the changes of a gauge in its argument."""


def test_gauges_of_several_api_servers_are_the_sum_of_all_changes(registry: CollectorRegistry, tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", API_SERVERS, "+3", "-1 -1"], env=environment, check=True)
    MultiProcessCollector(registry, str(tmp_path))  # type: ignore[no-untyped-call]
    assert value(registry, "pending_loads", "nvme") == 1
    assert value(registry, "stores_total", "nvme") == 3


def test_histograms_of_ranks_add_up_value_by_value(
    shown: HybridOffloadPromMetrics, registry: CollectorRegistry
) -> None:
    values = ([0.0, 0.001, 0.0011, 0.1], [0.1, 0.2, 31.0, 100.0])  # on and beside the buckets' bounds
    report = HybridOffloadStats()
    for of_rank in values:
        counters = Counters()
        for seconds in of_rank:
            counters.observe("load_seconds", "a|b:1", seconds)
        report.aggregate(HybridOffloadStats.from_counts(counters.take_histograms()))
    assert report.reduce() == {}, "vLLM's log line has no buckets"
    shown.observe(report.data)
    expected = Histogram("expected", "", buckets=BUCKET_SECONDS, registry=registry)
    for seconds in (*values[0], *values[1]):
        expected.observe(seconds)
    for bound in (*map(str, BUCKET_SECONDS), "+Inf"):
        labels = {"engine": "0", "tier": "a|b:1", "le": bound}
        found = registry.get_sample_value("vllm:hybrid_offload_load_seconds_bucket", labels)
        assert found == registry.get_sample_value("expected_bucket", {"le": bound}), bound
    assert value(registry, "load_seconds_sum", "a|b:1") == pytest.approx(sum(map(sum, values)))


def test_a_tier_shows_all_its_metrics_from_its_first_count_on(
    shown: HybridOffloadPromMetrics, registry: CollectorRegistry
) -> None:
    shown.observe({"stores|nvme": 1, "lookup_wait_seconds|all": 0.5})
    names = [*(f"{name}_total" for name in COUNTERS), *GAUGES, *(f"{name}_count" for name in HISTOGRAMS)]
    assert {name: value(registry, name, "nvme") for name in names} == {**dict.fromkeys(names, 0), "stores_total": 1}
    assert [name for name in names if value(registry, name, "all") is not None] == ["lookup_wait_seconds_total"]


def test_every_name_is_shown_once_with_its_kind(shown: HybridOffloadPromMetrics, registry: CollectorRegistry) -> None:
    shown.observe({f"{name}|t": 1 for name in (*COUNTERS, *GAUGES)})
    kinds = {metric.name: metric.type for metric in registry.collect()}
    assert kinds == {f"vllm:hybrid_offload_{name}": "counter" for name in COUNTERS} | {
        f"vllm:hybrid_offload_{name}": "gauge" for name in GAUGES
    } | {f"vllm:hybrid_offload_{name}": "histogram" for name in HISTOGRAMS}
