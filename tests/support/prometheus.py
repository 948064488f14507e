"""A real Prometheus, from Debian's package ``prometheus``."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT
from tests.support.server_process import LOOPBACK, ServerProcess, free_port

FOLDER = ROOT / "examples" / "monitoring"
ALERTS = FOLDER / "alerts.yaml"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana-dashboard.json").read_text())
MISSING = "needs {}, on PATH or in the folder that OFFLOAD_TEST_PROMETHEUS names"


def find_program(name: str) -> str | None:
    """Return the path of a program of the package."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("OFFLOAD_TEST_PROMETHEUS", ""), os.environ["PATH"]]))


def as_grafana_sends_it(query: str, seconds: int = 60) -> str:
    """Return a query of the dashboard with its variables replaced: all engines and tiers.

    Args:
        seconds: the time that a rate covers.
    """
    for name, value in {"$__rate_interval": f"{seconds}s", "$engine": ".*", "$tier": ".*"}.items():
        query = query.replace(name, value)
    return query


class Prometheus:
    """A running Prometheus."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer of the HTTP API."""
        with urllib.request.urlopen(f"{self._address}{path}?{urllib.parse.urlencode(parameters)}", timeout=10) as found:
            return json.load(found)["data"]

    def values(self, query: str) -> list[float]:
        """Return the values of a query that are numbers."""
        values = [float(one["value"][1]) for one in self.get("/api/v1/query", query=query)["result"]]
        return [value for value in values if value == value]

    def is_ready(self) -> bool:
        """Return whether it answers."""
        with contextlib.suppress(OSError, HTTPException), urllib.request.urlopen(f"{self._address}/-/ready", timeout=5):
            return True
        return False


@contextlib.contextmanager
def prometheus(folder: Path, page: str, interval: str = "200ms") -> Iterator[Prometheus]:
    """Run Prometheus with our rules on the metrics of an address, until the block ends.

    Args:
        interval: the time from one scrape to the next.

    Raises:
        FileNotFoundError: it is not installed.
    """
    program = find_program("prometheus")
    if program is None:
        raise FileNotFoundError(MISSING.format("prometheus"))
    target = urllib.parse.urlsplit(page).netloc
    (folder / "prometheus.yml").write_text(
        f"global: {{scrape_interval: {interval}, scrape_timeout: {interval}, evaluation_interval: {interval}}}\n"
        f"rule_files: [{ALERTS}]\n"
        f"scrape_configs: [{{job_name: vllm, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    port = free_port()
    running = Prometheus(f"http://{LOOPBACK}:{port}")
    command = [
        program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={LOOPBACK}:{port}",
    ]  # fmt: skip
    server = ServerProcess(command, running.is_ready, folder / "prometheus.log")
    try:
        server.start()
        yield running
    finally:
        server.stop()
