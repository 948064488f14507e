"""The entrance that vLLM uses: the connector's class, its metrics, and a request's own wishes. This imports vLLM."""

from __future__ import annotations

import importlib
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tests.golden import subject
from tests.golden.masks import without_prose

LABELS = {"model_name": "golden", "engine": "0"}


def connector() -> Any:
    """Return the class that ``--kv-transfer-config`` names."""
    return importlib.import_module(subject.ENGINE_MODULE).HybridOffloadConnector


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return every metric that the connector registers in vLLM: name, type and labels; sorted by name."""
    registry = CollectorRegistry()
    registered: list[dict[str, Any]] = []

    def register(metric: Any, **fields: Any) -> Any:
        made = metric(**fields, registry=registry)
        (family,) = made.describe()
        registered.append({"name": family.name, "type": family.type, "labels": list(fields["labelnames"])})
        return made

    types = {metric: partial(register, metric) for metric in (Counter, Gauge, Histogram)}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    connector().build_prom_metrics(config, types, list(LABELS), {0: list(LABELS.values())})
    return sorted(registered, key=lambda metric: str(metric["name"]))


def exposition(reports: list[dict[str, Any]]) -> str:
    """Return what a server shows after workers have sent ``reports``, without the texts."""
    registry = CollectorRegistry()
    types = {metric: partial(metric, registry=registry) for metric in (Counter, Gauge, Histogram)}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    shown = connector().build_prom_metrics(config, types, list(LABELS), {0: list(LABELS.values())})
    for report in reports:
        shown.observe(connector().build_kv_connector_stats(report).data, 0)
    lines = generate_latest(registry).decode().splitlines()
    return "\n".join(line for line in lines if not line.startswith("#") and "_created{" not in line)


def request_options(folder: Path) -> dict[str, Any]:
    """Return the keys that a request may have in its ``kv_transfer_params``, and how some are read."""
    key, model = subject.request_options()
    examples: dict[str, Any] = {
        "nothing": None,
        "others' keys": {"do_remote_prefill": True},
        "no wish": {key: {}},
        "no load": {key: {"load": False}},
        "no store": {key: {"store": False}},
        "neither": {key: {"load": False, "store": False}},
        "an unknown key": {key: {"stor": False}},
        "another type": {key: {"load": "no"}},
        "no mapping": {key: True},
    }
    read = {
        name: model.of(SimpleNamespace(request_id="r", kv_transfer_params=params), ["ram", "disk"]).model_dump()
        for name, params in examples.items()
    }
    return {"key": key, "schema": without_prose(model.model_json_schema()), "read": read}


def identity(folder: Path) -> dict[str, Any]:
    """Return the parts of the fingerprints under which an engine of two ranks stores, without the machine's values."""
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    kv = folder / "kv"
    with mock.patch.dict(os.environ, environment):
        os.environ.pop("PYTHONHASHSEED", None)
        of_engine, of_workers = subject.run_engine(folder / "model", kv, prompt_tokens=600, ranks=2)
    parts = [{**of_engine, "reset": "", "rank": rank, "layout": layout} for rank, layout in enumerate(of_workers)]
    used = {path.name for path in kv.iterdir() if not path.name.startswith(".")}
    assert used == set(map(subject.fingerprint, parts)), "objects lie under other fingerprints"
    described: dict[str, Any] = {**parts[0], "model_config": "<dict>"}
    described["engine"] = [described["engine"][0], "<version>"]
    described["model"] = {**described["model"], "files": sorted(described["model"]["files"])}
    for group in described["groups"]:
        group["spec"] = {"kind": group["spec"]["kind"], "block_size": group["spec"]["block_size"]}
    return described
