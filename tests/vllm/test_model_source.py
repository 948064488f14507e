"""An engine's model is identified by all files that decide the bytes, or by the name that the operator gives it."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from offload_core.api.errors import ConfigError
from offload_core.vllm.model.source import model_source
from tests.support.process_state import bytes_read
from tests.support.tiny_models import write_gemma3

COMMIT = "0123456789012345678901234567890123456789"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """vLLM's own configuration for a small model."""
    folder = write_gemma3(tmp_path_factory.mktemp("models") / "gemma3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        return EngineArgs(model=str(folder), dtype="float32", enforce_eager=True).create_engine_config()


@pytest.fixture
def engine(made: Any, tmp_path: Path) -> Any:
    """The configuration, with a copy of the model that a test may change."""
    config = copy.copy(made)
    config.model_config = copy.copy(made.model_config)
    config.load_config = copy.copy(made.load_config)
    config.model_config.model = shutil.copytree(made.model_config.model, tmp_path / "model")
    config.model_config.model = config.model_config.tokenizer = str(tmp_path / "model")
    return config


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of the hub's client."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def snapshot(hub: Path, name: str = "org/model") -> Path:
    """Write a repository with a weight file as a link into its blobs; returns the blob."""
    repository = hub / f"models--{name.replace('/', '--')}"
    (repository / "snapshots" / COMMIT).mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMIT)
    (repository / "blobs/abc").write_bytes(b"content")
    (repository / "snapshots" / COMMIT / "file.safetensors").symlink_to("../../blobs/abc")
    return repository / "blobs/abc"


def changes(engine: Any, path: Path) -> bool:
    """Return whether the identity changes with a byte of a file."""
    before = json.dumps(model_source(engine, None))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return json.dumps(model_source(engine, None)) != before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "modeling.py", "sub/x.npz"])
def test_the_files_of_a_folder_count(engine: Any, name: str) -> None:
    path = Path(engine.model_config.model, name)
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        path.write_bytes(b"content")
    assert changes(engine, path)


def test_a_model_in_one_file_is_identified_by_its_content_and_that_of_its_folder(engine: Any) -> None:
    folder = Path(engine.model_config.model)
    for name in ("model-q4.gguf", "model-q8.gguf"):
        (folder / name).write_bytes(b"content")
    engine.model_config.model = str(folder / "model-q4.gguf")
    four = model_source(engine, None)
    engine.model_config.model = str(folder / "model-q8.gguf")
    assert model_source(engine, None) != four
    assert changes(engine, folder / "model-q8.gguf")


@pytest.mark.parametrize("place", ["the default", "a folder for downloads"])
def test_a_model_by_its_name_on_the_hub_is_identified_by_its_blobs(
    engine: Any, hub: Path, place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine.model_config.model = "org/model"
    engine.model_config.hf_config = SimpleNamespace(_commit_hash=COMMIT)
    if place == "a folder for downloads":
        engine.load_config.download_dir = str(tmp_path / "downloads")
        hub = tmp_path / "downloads"
    assert changes(engine, snapshot(hub))
    assert caplog.text == ""


def test_code_from_another_repository_counts(engine: Any, hub: Path) -> None:
    code = snapshot(hub, "org/code")
    engine.model_config.hf_config = SimpleNamespace(auto_map={"AutoModel": "org/code--modeling.Model"})
    assert changes(engine, code)


def test_a_draft_model_counts(engine: Any, tmp_path: Path) -> None:
    draft = Path(shutil.copytree(engine.model_config.model, tmp_path / "draft"))
    engine.speculative_config = SimpleNamespace(draft_model_config=SimpleNamespace(model=str(draft), revision=None))
    assert changes(engine, draft / "model.safetensors")


def test_a_tokenizer_elsewhere_counts_if_the_model_may_use_it(engine: Any, tmp_path: Path) -> None:
    tokenizer = Path(shutil.copytree(engine.model_config.model, tmp_path / "tokenizer")) / "tokenizer.json"
    engine.model_config.tokenizer = str(tokenizer.parent)
    assert not changes(engine, tokenizer)
    engine.model_config.multimodal_config = object()
    assert engine.model_config.is_multimodal_model
    assert changes(engine, tokenizer)


@pytest.mark.parametrize("kind", ["a name without files here", "weights in a bucket"])
def test_files_that_are_elsewhere_are_a_warning(
    engine: Any, hub: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    address = "org/elsewhere" if kind == "a name without files here" else "s3://bucket/model"
    if kind == "a name without files here":
        engine.model_config.model = address
    else:
        engine.model_config.model_weights = address
    identity = model_source(engine, None)
    assert address in identity.values()
    (record,) = caplog.records
    assert f"the files of '{address}' are not on this host" in record.getMessage()
    assert "set model_identity" in record.getMessage()


def test_a_name_given_by_the_operator_stands_for_all_files(engine: Any) -> None:
    large = Path(engine.model_config.model, "large.safetensors")
    with large.open("wb") as file:
        file.truncate(64 * 1024 * 1024)
    assert bytes_read(lambda: model_source(engine, None)) > 64 * 1024 * 1024
    assert bytes_read(lambda: model_source(engine, "my model")) < 100_000
    named = model_source(engine, "my model")
    large.unlink()
    engine.model_config.model = "/elsewhere"
    assert model_source(engine, "my model") == named
    assert model_source(engine, "your model") != named


def test_dummy_weights_of_another_seed_are_others_also_under_one_name(engine: Any) -> None:
    engine.load_config.load_format = "dummy"
    first = model_source(engine, "name")
    engine.model_config.seed = engine.model_config.seed + 1
    assert model_source(engine, "name") != first


def test_a_file_that_cannot_be_read_stops_the_start_with_the_cure(engine: Any) -> None:
    weights = Path(engine.model_config.model, "weights.bin")
    weights.symlink_to("/proc/self/mem")  # a regular file; reading its first bytes fails for every user
    with pytest.raises(ConfigError, match=r"identified by its files: .*(; let the engine's user read it).*"):
        model_source(engine, None)
    weights.unlink()
    os.mkfifo(weights)
    assert model_source(engine, None)
