"""The dashboard and the alert rules of ``examples/monitoring``: their names, and their queries in a real Prometheus."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from benchmarks.dashboard import record
from offload_core.runtime.metrics import COUNTERS, GAUGES, HISTOGRAMS, Counters
from offload_core.vllm.metrics import HybridOffloadPromMetrics, HybridOffloadStats
from tests.support.metrics_page import MetricsPage, served
from tests.support.paths import ROOT
from tests.support.polling import wait_until
from tests.support.prometheus import ALERTS, DASHBOARD, MISSING, as_grafana_sends_it, find_program, prometheus

RULES: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
OF_VLLM = {f"vllm:{name}_total" for name in ("prefix_cache_hits", "prefix_cache_queries", "external_prefix_cache_hits")}
SHOWN = {
    *(f"vllm:hybrid_offload_{name}_total" for name in COUNTERS),
    *(f"vllm:hybrid_offload_{name}" for name in GAUGES),
    *(f"vllm:hybrid_offload_{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")),
}
SICK = {
    "OffloadTierPaused": {"breaker_open": 1},
    "OffloadObjectsDamaged": {"load_corrupt": 1},
    "OffloadLoadsFail": {"load_failures": 1},
    "OffloadDeadlinesMissed": {"lookup_timeouts": 1},
    "OffloadStoresDropped": {"store_dropped": 5},
    "OffloadThreadsStuck": {"stuck_threads": 1},
    "OffloadIoProcessEnds": {"io_process_ends": 1},
    "OffloadStoredAndNeverRead": {"evictions_unread": 1},
}
"""Per alert, the counts of each step of an engine for which it fires."""
HEALTHY = {
    "queries": 3, "query_hits": 2, "query_misses": 1, "hit_tokens": 1000, "prefill_seconds_saved": 1.5, "load_hits": 9,
    "load_wait_seconds": 0.5, "load_bytes": 1 << 20, "store_bytes": 1 << 20, "stores": 9, "evictions": 1,
}  # fmt: skip


def dashboard_queries() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def program(name: str) -> str:
    """Return the path of a program of Debian's package ``prometheus``, or skip the test."""
    path = find_program(name)
    if path is None:
        pytest.skip(MISSING.format(name))
    return path


def test_the_metrics_of_dashboard_and_alerts_exist() -> None:
    variables = [one["query"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    for query in (*dashboard_queries(), *variables, *(rule["expr"] for rule in RULES)):
        named = set(re.findall(r"\bvllm:\w+", query))
        assert named
        assert named <= SHOWN | OF_VLLM, query


def test_the_dashboard_has_no_variable_that_nothing_sets() -> None:
    known = {one["name"] for one in DASHBOARD["templating"]["list"]} | {"__rate_interval", "__all"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) <= known
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len({tuple(panel["gridPos"].items()) for panel in panels}) == 13
    assert all("$" not in as_grafana_sends_it(query) for query in dashboard_queries())


class Engine:
    """The metrics of an engine with one tier, and of vLLM's own caches; each step adds to them."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def registered(metric: Any) -> Any:
            return lambda **fields: metric(**fields, registry=self._registry)

        types = {metric: registered(metric) for metric in (Counter, Gauge, Histogram)}
        config: Any = SimpleNamespace(kv_transfer_config=None)
        self._shown = HybridOffloadPromMetrics(config, types, ["model_name", "engine"], {0: ["m", "0"]})
        self._own = [
            Counter(name.removesuffix("_total"), "…", ["model_name", "engine"], registry=self._registry)
            for name in OF_VLLM
        ]
        self.sick: Mapping[str, float] = {}
        self.seconds = 0.05

    def step(self) -> str:
        """Add a step's counts, and return the page."""
        counters = Counters()
        for name, count in (*HEALTHY.items(), *self.sick.items()):
            counters.add(name, "nvme", count)
        for name in HISTOGRAMS:
            counters.observe(name, "nvme", self.seconds)
        self._shown.observe(HybridOffloadStats.from_counts({**counters.take(), **counters.take_histograms()}).data)
        for counter in self._own:
            counter.labels("m", "0").inc(100)
        return generate_latest(self._registry).decode()


@contextlib.contextmanager
def stepping(engine: Engine, page: MetricsPage) -> Iterator[None]:
    """Let an engine step all the time, until the block ends."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(0.05):
            page.text = engine.step()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_the_picture_in_the_document_shows_every_panel() -> None:
    picture = (ROOT / "docs" / "pictures" / "dashboard.svg").read_text()
    assert "(pictures/dashboard.svg)" in (ROOT / "docs" / "metrics.md").read_text()
    for panel in DASHBOARD["panels"]:
        assert f">{panel['title']}</text>" in picture, "run: python -m benchmarks.dashboard"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_served_engine_answers_every_query_of_the_dashboard(tmp_path: Path) -> None:
    program("prometheus")
    shown = record(tmp_path, seconds=40)
    for panel in DASHBOARD["panels"]:
        named = {target["legendFormat"].replace("{{tier}}", "nvme") for target in panel["targets"]}
        assert named <= {line.label for line in shown[panel["id"]]}
    tokens = {line.label: sum(value for _, value in line.points) for line in shown[2]}
    assert tokens["ram"] + tokens["nvme"] > 0, "the engine is not served"


@pytest.mark.long
def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run([program("promtool"), "check", "rules", ALERTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{len(RULES)} rules found" in done.stdout


@pytest.mark.long
def test_every_query_has_an_answer_and_every_alert_fires_for_its_cause_only(tmp_path: Path) -> None:
    def has_values(query: str) -> bool:
        return bool(database.values(query))

    program("prometheus")
    engine = Engine()
    with served(engine.step()) as page, prometheus(tmp_path, page.address) as database, stepping(engine, page):
        for query in map(as_grafana_sends_it, dashboard_queries()):
            wait_until(partial(has_values, query), f"no answer to {query}")
            assert min(database.values(query)) >= 0, query
        wait_until(lambda: len(database.get("/api/v1/rules")["groups"]) == 1, "the rules are not read")
        wait_until(
            lambda: {rule["health"] for rule in database.get("/api/v1/rules")["groups"][0]["rules"]} == {"ok"},
            "a rule has an error",
        )
        assert [rule["alert"] for rule in RULES if has_values(rule["expr"])] == []
        assert {rule["alert"] for rule in RULES} == {*SICK, "OffloadLoadsSlow"}
        for rule in RULES:
            engine.sick = SICK.get(rule["alert"], {})
            engine.seconds = 20.0 if rule["alert"] == "OffloadLoadsSlow" else 0.05
            wait_until(partial(has_values, rule["expr"]), f"{rule['alert']} does not fire")
