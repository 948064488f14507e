"""A configuration that cannot work stops the engine at start, with one message that names every problem."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engine.lab import Lab, ours
from tests.support.engine.spec import Round, RunFailedError


@pytest.mark.parametrize(
    "multiprocessing",
    [pytest.param("0", id="in-process"), pytest.param("1", id="own process", marks=pytest.mark.long)],
)
def test_every_problem_in_one_message(gemma3: Lab, tmp_path: Path, multiprocessing: str) -> None:
    config = tmp_path / "offload.yaml"
    config.write_text(
        f"""
hybrid_chunk_size: many
staging_byte: 1GiB
load_timeout_seconds: -1
backends:
  - {{name: one, type: disk, path: {tmp_path}/missing/kv}}
  - {{name: one, type: dsk, path: {tmp_path}/kv}}
  - {{name: two, type: disk, path: {tmp_path}/kv, lod_weight: 3}}
"""
    )
    transfer = ours(tmp_path)
    transfer["kv_connector_extra_config"] = {"config_file": str(config), "staging_bytes": "5 bananas"}
    rounds = [Round(name="never", prompts=gemma3.prompts(20))]

    with pytest.raises(RunFailedError) as failure:
        gemma3.run(rounds, transfer, {"VLLM_ENABLE_V1_MULTIPROCESSING": multiprocessing})

    message = str(failure.value)
    for part in (
        "problems in",
        "hybrid_chunk_size: 'many'",
        "staging_byte: unknown key (did you mean 'staging_bytes'?)",
        "staging_bytes: '5 bananas' is not a size; write a number of bytes or a size such as 20GiB",
        "load_timeout_seconds: -1",
        f"the parent folder {tmp_path}/missing does not exist",
        "backends.1.type: no plugin provides the backend type 'dsk' (did you mean 'disk'?); "
        "known types: cpu, disk, lmcache, mooncake, nfs, nixl",
        "backends.1.name: 'one' is used by 2 backends",
        "backends.2.lod_weight: unknown key (did you mean 'load_weight'?)",
    ):
        assert part in message, part


def test_chunk_size_under_which_nothing_could_ever_be_stored(qwen3_next: Lab, tmp_path: Path) -> None:
    rounds = [Round(name="never", prompts=qwen3_next.prompts(20))]
    with pytest.raises(RunFailedError, match=r"hybrid_chunk_size 4096.*set hybrid_chunk_size to 256"):
        qwen3_next.run(rounds, ours(tmp_path / "kv", hybrid_chunk_size=4096), max_model_len=2048)
