"""Half an hour of random work on the real engine, over a disk with every fault, by scripts of faults.

Prints the memory and the served tokens over time. Fails (exit status 1) in these cases:

- Resident memory of the engine's process or of its I/O process grows after the warm-up (the first 30 %), without mapped
  files. The limit for the line through the samples is 8 MiB and 0.1 MiB per minute.
- The I/O process ends.
- Threads, tasks, file descriptors or staging leases are left after a round and the end of its faults.
- A request waits longer for storage than its deadlines and a step after each wait.
- The counters of jobs do not add up.
- An output differs from that without offloading. If the model runs in bfloat16, the output may differ by rounding.

    python -m benchmarks.soak [--seconds 1800] [--model gemma3 | qwen3_next] [--capacity 48MiB]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from offload_core.testing.faults.plugin import JOURNAL_VARIABLE, TIER_KEYS
from tests.support import tiny_models
from tests.support.engine.spec import RunSpec, install_plugin, run_environment

RUN_MODULE = "tests.support.engine.soak_run"

MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {"write": tiny_models.write_gemma3, "dtype": "float32", "block_size": 128, "blocks": 84},
    "qwen3_next": {"write": tiny_models.write_qwen3_next, "dtype": "bfloat16", "block_size": 256, "blocks": 28},
}
"""The tiny models, and caches for them that a few requests fill."""

STEADY = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8", "VLLM_LOGGING_LEVEL": "WARNING"}
"""Environment variables of the run.

oneDNN caches kernels by shape, and the shapes are ever new here: some 20 MiB per round, without offloading too. vLLM
logs no progress.
"""


def spec(name: str, folder: Path, capacity: str) -> RunSpec:
    """Return a run of a tiny model whose only tier is a disk, with a capacity so small that it evicts."""
    model = MODELS[name]
    tier = {
        "name": "disk",
        "type": "disk",
        "path": str(folder / "kv"),
        "capacity": capacity,
        **TIER_KEYS,
    }
    return RunSpec(
        model=str(model["write"](folder / name)),
        dtype=model["dtype"],
        max_model_len=1536,
        num_gpu_blocks_override=model["blocks"],
        kv_transfer_config={
            "kv_connector": "WaitingConnector",
            "kv_connector_module_path": "tests.support.engine.waiting",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "hybrid_chunk_size": model["block_size"],
                "load_timeout_seconds_per_mib": 0,
                "load_when": "always",
                "backends": [tier],
            },
        },
        around_workloads="tests.support.engine.fault_run:under_faults",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800.0, help="duration of the run")
    parser.add_argument("--model", choices=list(MODELS), default="gemma3", help="the tiny model")
    parser.add_argument("--capacity", default="48MiB", help="capacity of the disk tier")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        run = spec(arguments.model, folder, arguments.capacity)
        (folder / "spec.json").write_text(run.model_dump_json())
        site = install_plugin(folder / "site", "fault-plugin", "offload_core.testing.faults.plugin")
        search_path = os.pathsep.join([str(site), *(entry for entry in sys.path if entry)])
        return subprocess.call(
            [sys.executable, "-m", RUN_MODULE, str(folder / "spec.json"), str(arguments.seconds)],
            env={
                **run_environment(run),
                **STEADY,
                **os.environ,
                "PYTHONPATH": search_path,
                JOURNAL_VARIABLE: str(folder / "journal"),
            },
        )


if __name__ == "__main__":
    sys.exit(main())
