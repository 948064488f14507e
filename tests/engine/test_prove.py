"""``offload-core prove`` on real engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.lab import Lab, installed, objects
from tests.support.engine.spec import RunSpec, run_environment
from tests.support.paths import ROOT

_ENGINE = ("--max-model-len", "8192", "--enforce-eager", "--kv-cache-memory-bytes", "268435456", "--max-num-seqs", "8")


def _prove(lab: Lab, folder: Path, *tiers: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    config = folder / "offload.json"
    config.write_text(json.dumps({"backends": [{"path": str(folder / tier["name"]), **tier} for tier in tiers]}))
    search_path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, **run_environment(RunSpec(model="")), "PYTHONPATH": search_path}
    environment["PYTHONPATH"] = os.pathsep.join([installed(folder, "wrong_bytes")["PYTHONPATH"], search_path])
    command = [sys.executable, "-m", "offload_core.cli", "prove", str(lab.model), "--config", str(config), "--json"]
    engine = [*_ENGINE, "--dtype", lab.dtype, "--mamba-ssm-cache-dtype", "float32"]
    return subprocess.run(
        [*command, *engine], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False
    )


def _check_right(lab: Lab, folder: Path) -> None:
    done = _prove(lab, folder, {"name": "nvme", "type": "disk"})
    assert done.returncode == 0, done.stderr
    (tier,) = json.loads(done.stdout)["tiers"]
    assert (tier["tier"], tier["proved"], tier["fault"]) == ("nvme", True, "none")
    assert tier["tokens"] > 0
    assert objects(folder / "nvme") == [], "the run's objects are deleted"


def test_a_right_tier_is_proved(gemma3: Lab, tmp_path: Path) -> None:
    _check_right(gemma3, tmp_path)


@pytest.mark.long
def test_a_right_tier_is_proved_with_recurrent_states(qwen3_next: Lab, tmp_path: Path) -> None:
    _check_right(qwen3_next, tmp_path)


@pytest.mark.long
def test_a_tier_with_other_bytes_behind_a_right_checksum_is_named(gemma3: Lab, tmp_path: Path) -> None:
    done = _prove(gemma3, tmp_path, {"name": "liar", "type": "wrong"})
    assert done.returncode == 1, done.stderr
    (tier,) = json.loads(done.stdout)["tiers"]
    assert (tier["tier"], tier["proved"], tier["fault"]) == ("liar", False, "tier")
    assert "tier 'liar' differs from computing" in done.stderr
