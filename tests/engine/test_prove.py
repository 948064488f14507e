"""``offload-core prove`` on real engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.lab import Lab, installed, objects
from tests.support.engine.spec import RunSpec, run_environment
from tests.support.paths import ROOT

_ENGINE = ("--max-model-len", "8192", "--enforce-eager", "--kv-cache-memory-bytes", "268435456", "--max-num-seqs", "8")


def _prove(
    lab: Lab, folder: Path, *tiers: dict[str, Any], arguments: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    config = folder / "offload.json"
    config.write_text(json.dumps({"backends": tiers}))
    search_path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, **run_environment(RunSpec(model="")), "PYTHONPATH": search_path}
    environment["PYTHONPATH"] = os.pathsep.join([installed(folder, "wrong_bytes")["PYTHONPATH"], search_path])
    command = [sys.executable, "-m", "offload_core.cli", "prove", str(lab.model), "--config", str(config), "--json"]
    engine = [*_ENGINE, "--dtype", lab.dtype, "--mamba-ssm-cache-dtype", "float32", *arguments]
    return subprocess.run(
        [*command, *engine], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False
    )


def _check_right(lab: Lab, folder: Path) -> None:
    done = _prove(lab, folder, {"name": "nvme", "type": "disk", "path": str(folder / "nvme")})
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
    done = _prove(gemma3, tmp_path, {"name": "liar", "type": "wrong", "path": str(tmp_path / "liar")})
    assert done.returncode == 1, done.stderr
    (tier,) = json.loads(done.stdout)["tiers"]
    assert (tier["tier"], tier["proved"], tier["fault"]) == ("liar", False, "tier")
    assert "tier 'liar' differs from computing" in done.stderr


@pytest.mark.long
def test_each_of_several_tiers_is_proved_also_one_in_memory(gemma3: Lab, tmp_path: Path) -> None:
    ram = {"name": "ram", "type": "cpu", "capacity": "256MiB"}
    done = _prove(gemma3, tmp_path, ram, {"name": "share", "type": "nfs", "url": tmp_path.as_uri()})
    assert done.returncode == 0, done.stderr
    tiers = json.loads(done.stdout)["tiers"]
    assert [(tier["tier"], tier["fault"], tier["tokens"] > 0) for tier in tiers] == [
        ("ram", "none", True),
        ("share", "none", True),
    ]


@pytest.mark.long
def test_an_argument_that_vllm_does_not_know_is_refused_in_one_line(gemma3: Lab, tmp_path: Path) -> None:
    ram = {"name": "ram", "type": "cpu", "capacity": "256MiB"}
    done = _prove(gemma3, tmp_path, ram, arguments=["--max-model-lenn", "100"])
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "offload-core prove: error: unrecognized arguments: --max-model-lenn 100"
