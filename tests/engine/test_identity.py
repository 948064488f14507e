"""Engines share a folder exactly when their bytes mean the same."""

from __future__ import annotations

import shutil
from pathlib import Path

from offload_core.testing import tiny_models
from offload_core.testing.engine import Round, compare
from tests.engine.lab import Lab, ours, served


def test_engines_that_differ_never_share_and_equal_ones_do(gemma3: Lab, tmp_path: Path) -> None:
    rounds = [Round(name="prompts", prompts=gemma3.prompts(700, 1283, family=40))]
    kv = tmp_path / "kv"
    other_weights = Lab("seed 1", tiny_models.write_gemma3(tmp_path / "seed1", seed=1), "float32", 128)
    other_dtype = Lab("bfloat16", gemma3.model, "bfloat16", 128)
    copied = Lab("copy", Path(shutil.copytree(gemma3.model, tmp_path / "elsewhere")), "float32", 128)

    gemma3.run(rounds, ours(kv, hybrid_chunk_size=256))

    for lab, chunk_size in ((other_weights, 256), (other_dtype, 256), (gemma3, 128)):
        result = lab.run(rounds, ours(kv, hybrid_chunk_size=chunk_size))
        assert not any(served(result).values()), (lab.name, chunk_size)
        assert compare(lab.reference(rounds), result) == [], (lab.name, chunk_size)

    for lab, chunk_size in ((copied, 256), (other_weights, 256)):
        result = lab.run(rounds, ours(kv, hybrid_chunk_size=chunk_size))
        assert all(served(result).values()), (lab.name, chunk_size)
        assert compare(lab.reference(rounds), result) == [], (lab.name, chunk_size)
