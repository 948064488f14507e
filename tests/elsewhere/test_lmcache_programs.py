"""LMCache's own checks and measurements of L2 adapters, on ours."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.clusters import lmcache

ENVIRONMENT = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
PLUGIN = {"type": "plugin", "module_path": "offload_core.elsewhere.lmcache_l2", "class_name": "OffloadCoreL2Adapter"}

pytestmark = pytest.mark.skipif(lmcache.why_not() is not None, reason=str(lmcache.why_not()))


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    path = tmp_path / "offload.json"
    backend = {"name": "nvme", "type": "disk", "path": str(tmp_path / "kv")}
    path.write_text(json.dumps({"staging_bytes": "64MiB", "model_identity": "a-model", "backends": [backend]}))
    return json.dumps({**PLUGIN, "adapter_params": {"config_file": str(path)}})


def run(*arguments: str) -> str:
    """Run a program of LMCache; returns its output."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(importlib.util.find_spec("aiofile") is None, reason="LMCache's basic_check needs aiofile")
def test_lmcaches_basic_check_passes(plugin: str) -> None:
    shown = run("-m", "lmcache.v1.basic_check", "--mode", "test_l2_adapter", "--l2-adapter", plugin, "--num-keys", "7")
    assert "Testing L2 adapter #0 (OffloadCoreL2Adapter)" in shown
    for line in ("7/7 correctly absent", "Batch store OK", "7/7 found", "(loaded): 7/7", "(content): 7/7"):
        assert line in shown, shown


@pytest.mark.long
def test_lmcaches_benchmark_of_adapters_loses_nothing(plugin: str) -> None:
    main = "import sys; from lmcache.cli.main import main; sys.argv[0] = 'lmcache'; main()"
    sizes = ["--num-keys", "8", "--in-flight", "4", "--data-size-kb", "256"]
    shown = run("-c", main, "bench", "l2", "--l2-adapter", plugin, *sizes)
    rounds = re.findall(r"\[(\w+)\] Round \d+: [\d.]+ ms, (?:success_keys|loaded)=(\d+)/(\d+)", shown)
    assert {kind for kind, _, _ in rounds} == {"Store", "Load"}
    assert {(done, asked) for _, done, asked in rounds} == {("32", "32")}, shown
