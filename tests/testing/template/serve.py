"""Serve in the clean environment: one engine stores to sqlite and one loads.

    python serve.py FOLDER

Writes first.json and second.json to the folder.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.support import tiny_models
from tests.support.engine.spec import PromptSpec, Round, RunSpec, run_in_process


def main(folder: Path) -> None:
    model = tiny_models.write_qwen3_next(folder / "model")
    prompts = [
        PromptSpec(name=str(length), token_ids=tiny_models.prompt_token_ids(length, seed=1, vocab_size=1024))
        for length in (300, 1283, 2000)
    ]
    tier = {"name": "database", "type": "sqlite", "path": str(folder / "kv-cache.sqlite"), "capacity": "64MiB"}
    offloading: dict[str, Any] = {
        "kv_connector": "HybridOffloadConnector",
        "kv_connector_module_path": "offload_core.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lookup_timeout_seconds": 30, "load_when": "always", "backends": [tier]},
    }
    for name in ("first", "second"):
        spec = RunSpec(
            model=str(model),
            dtype="bfloat16",
            kv_transfer_config=offloading,
            rounds=[Round(name="prompts", prompts=prompts)],
        )
        result = run_in_process(spec, timeout_seconds=200)
        (folder / f"{name}.json").write_text(result.model_dump_json())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
