"""Engines share a folder exactly when their bytes mean the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support import tiny_models
from tests.support.engine.lab import TO_THE_LAST_STORE, Lab, ours, served
from tests.support.engine.spec import Round, compare


@pytest.mark.parametrize("lab", ["gemma3"], indirect=True)
def test_engines_that_differ_never_share_and_equal_ones_do(lab: Lab, stored: Path, tmp_path: Path) -> None:
    rounds = lab.standard(700, 1283)
    kv = Path(shutil.copytree(stored, tmp_path / "kv"))
    other_weights = Lab("seed 1", tiny_models.write_gemma3(tmp_path / "seed1", seed=1), "float32", 128)
    other_dtype = Lab("bfloat16", lab.model, "bfloat16", 128)
    copied = Lab("copy", Path(shutil.copytree(lab.model, tmp_path / "elsewhere")), "float32", 128)

    alone = {
        (other.name, chunk_size): other.run(rounds, ours(kv, hybrid_chunk_size=chunk_size))
        for other, chunk_size in ((other_weights, 256), (other_dtype, 256), (lab, 128))
    }
    for name, result in alone.items():
        assert not any(served(result).values()), name
    assert compare(lab.alone(rounds), alone["gemma3", 128]) == []

    for other, wanted in ((copied, lab.alone(rounds)), (other_weights, alone["seed 1", 256])):
        result = other.run(rounds, ours(kv, hybrid_chunk_size=256))
        assert all(served(result).values()), other.name
        assert compare(wanted, result) == [], other.name


@pytest.mark.long
def test_lengths_that_turn_keys_otherwise_never_share(tmp_path: Path) -> None:
    """vLLM's LongRoPE has other factors for all positions if ``max_model_len`` is above the original length."""
    lab = Lab("phi3", tiny_models.write_phi3(tmp_path / "phi3", original_length=1024), "float32", 128)
    rounds = [Round(name="prompts", prompts=lab.prompts(700, family=30))]
    transfer = ours(tmp_path / "kv", hybrid_chunk_size=128, **TO_THE_LAST_STORE)

    lab.run(rounds, transfer, max_model_len=4096)
    short = lab.run(rounds, transfer, max_model_len=1024)
    assert not any(served(short).values())
    assert compare(lab.reference(rounds, max_model_len=1024), short) == []

    again = lab.run(rounds, transfer, max_model_len=1024)
    assert all(served(again).values())
    assert compare(lab.reference(rounds, max_model_len=1024), again) == []
