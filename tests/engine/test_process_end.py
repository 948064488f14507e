"""However a process ends, what it computed is on disk afterwards, and it ends soon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.engine.lab import TO_THE_LAST_STORE, Lab, objects, ours
from tests.support.engine.spec import RunSpec, run_environment

_SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams

llm = LLM(**json.loads(sys.argv[1]))
llm.generate({"prompt_token_ids": json.loads(sys.argv[2])}, SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
print("generated")
"""


def test_script_that_ends_without_shutting_its_engine_down(gemma3: Lab, tmp_path: Path) -> None:
    engine = {
        "model": str(gemma3.model), "dtype": gemma3.dtype, "max_model_len": 4096, "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 28,
        "kv_transfer_config": ours(tmp_path / "kv", **TO_THE_LAST_STORE),
    }  # fmt: skip
    token_ids = gemma3.prompts(1300)[0].token_ids
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, json.dumps(engine), json.dumps(token_ids)],
        env={**os.environ, **run_environment(RunSpec(model="", rounds=[]))},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "generated" in done.stdout
    assert "Traceback" not in done.stderr
    assert len(objects(tmp_path / "kv")) == 2 * (1300 // 256)
    assert not list((tmp_path / "kv").rglob("*.tmp"))
