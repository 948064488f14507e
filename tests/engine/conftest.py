"""Fixtures for tests on the real engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.media import MEDIA, Place, Storage
from tests.media.fuse.fixtures import _session_fault_fs as _session_fault_fs
from tests.media.fuse.fixtures import fault_fs as fault_fs
from tests.support import tiny_models
from tests.support.engine.lab import Lab, ours
from tests.support.s3_server import S3_CREDENTIALS, S3Server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def gemma3(models: Path) -> Lab:
    return Lab("gemma3", tiny_models.write_gemma3(models / "gemma3"), "float32", 128)


@pytest.fixture(scope="session")
def qwen3_next(models: Path) -> Lab:
    return Lab("qwen3_next", tiny_models.write_qwen3_next(models / "qwen3-next"), "bfloat16", 256)


@pytest.fixture(scope="session")
def mistral(models: Path) -> Lab:
    """A model of windows only."""
    return Lab("mistral", tiny_models.write_mistral(models / "mistral"), "float32", 128)


@pytest.fixture(scope="session", params=["gemma3", "qwen3_next"])
def lab(request: pytest.FixtureRequest) -> Lab:
    """Both models, one after the other."""
    chosen = request.getfixturevalue(request.param)
    assert isinstance(chosen, Lab)
    return chosen


@pytest.fixture(scope="session")
def stored(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that one process has filled with the standard prompts; tests that change it take a copy."""
    folder = tmp_path_factory.mktemp(f"stored-{lab.name}") / "kv"
    lab.run(lab.standard(), ours(folder))
    return folder


@pytest.fixture(scope="session", autouse=True)
def _no_connector_settings_from_outside() -> None:
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ, "unset it: the tests choose the mode themselves"


@pytest.fixture(scope="session", autouse=True)
def _s3_credentials(_no_connector_settings_from_outside: None) -> None:
    """From the first run on, since one whose variables differ cannot be forked from the server that has vLLM."""
    os.environ.update(S3_CREDENTIALS)


@pytest.fixture(scope="session")
def _s3_server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.kill()


@pytest.fixture
def bucket(_s3_server: S3Server) -> dict[str, Any]:
    """The keys of a tier on an empty bucket of a real S3-compatible server."""
    url = f"s3://{_s3_server.make_bucket()}/engines/kv"
    return {"url": url, "storage_options": {"endpoint_url": _s3_server.url}}


@pytest.fixture
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Storage]:
    """A function that makes a test's own copy of a row of :data:`tests.engine.media.MEDIA`."""

    def make(name: str) -> Storage:
        bucket = request.getfixturevalue("bucket") if MEDIA[name].needs_bucket else None
        return Storage(name, Place(tmp_path, bucket))

    return make
