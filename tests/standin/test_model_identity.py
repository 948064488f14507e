"""Engines find the objects of a model with the same files, or with the same name given in the configuration."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from vllm.config import MultiModalConfig, VllmConfig, WeightTransferConfig

from offload_core.api.errors import PlanError
from tests.standin.rig import Rig
from tests.support.standin import engine as standin_engine
from tests.support.standin.config import make_vllm_config
from tests.support.standin.engine import StandInEngine
from tests.support.standin.geometries import MODELS

PROMPT = [3 + i % 997 for i in range(600)]


def served(rig: Rig, **changes: Any) -> bool:
    """Return whether an engine that starts now loads the prompt."""
    engine: StandInEngine = rig.engine(MODELS["gpt_oss"](), **changes)
    (request,) = rig.run(engine, PROMPT)
    loaded = engine.served[request].external_tokens > 0
    rig.end(engine)
    return loaded


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


@pytest.mark.parametrize("name", ["modeling_custom.py", "sub/weights.npz", "model.safetensors"])
def test_an_edited_file_is_another_model(rig: Rig, folder: Path, name: str) -> None:
    (folder / "sub").mkdir()
    path = folder / name
    path.touch()
    assert [served(rig, folder=folder), served(rig, folder=folder)] == [False, True]
    path.write_bytes(path.read_bytes() + b"edited")
    assert [served(rig, folder=folder), served(rig, folder=folder)] == [False, True]


def test_a_given_name_stands_for_the_files(rig: Rig, folder: Path) -> None:
    assert not served(rig, folder=folder)
    assert not served(rig, folder=folder, model_identity="mine")
    (folder / "model.safetensors").write_bytes(b"edited")
    assert served(rig, folder=folder, model_identity="mine")
    assert not served(rig, folder=folder, model_identity="yours")


def test_an_engine_whose_weights_a_trainer_changes_shares_nothing(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "offload_core"):
        changing = [served(rig, weight_transfer_config=WeightTransferConfig()) for _ in range(2)]
    assert changing == [False, False]
    assert sum("weight_transfer_config is set" in record.getMessage() for record in caplog.records) == 2
    assert [served(rig), served(rig)] == [False, True]


def test_hashes_that_can_be_forged_are_one_warning(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    with caplog.at_level(logging.WARNING, "offload_core"):
        rig.end(rig.engine(MODELS["gpt_oss"](), ranks=2, prefix_caching_hash_algo="xxhash"))
    warnings = [record.getMessage() for record in caplog.records if "cryptographic" in record.getMessage()]
    assert len(warnings) == 1


@pytest.mark.parametrize(
    ("cache_gb", "prefix_caching", "refused"), [(0, False, True), (0, True, False), (4, False, False)]
)
def test_images_that_vllm_numbers_are_refused(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, cache_gb: float, prefix_caching: bool, refused: bool
) -> None:
    def make_multimodal(*arguments: Any) -> VllmConfig:
        config = make_vllm_config(*arguments)
        config.model_config.multimodal_config = MultiModalConfig(mm_processor_cache_gb=cache_gb)
        return config

    monkeypatch.setattr(standin_engine, "make_vllm_config", make_multimodal)
    if refused:
        with pytest.raises(PlanError, match="--enable-prefix-caching, or leave --mm-processor-cache-gb out"):
            rig.engine(MODELS["mla"](), enable_prefix_caching=prefix_caching)
    else:
        rig.end(rig.engine(MODELS["mla"](), enable_prefix_caching=prefix_caching))
