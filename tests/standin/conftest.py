"""Fixtures of the tests on the stand-in engine: vLLM's scheduler and managers, no model, no process of its own."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.lora.request import LoRARequest

from offload_core.runtime.io_loop import IoLoop
from tests.standin.rig import Rig
from tests.support.lora_folder import write_lora
from tests.support.standin.io import CallWatch
from tests.support.tiny_models import write_gemma3


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that vLLM accepts; the stand-in uses its vocabulary and its identity only."""
    return write_gemma3(tmp_path_factory.mktemp("models") / "gemma3", max_position_embeddings=16384)


@pytest.fixture
def adapters(model_folder: Path, tmp_path: Path) -> list[LoRARequest]:
    """Two LoRA adapters of the model."""
    return [
        LoRARequest(name, number, str(write_lora(tmp_path / name, model_folder, seed=number)))
        for number, name in enumerate(("one", "two"), 1)
    ]


@pytest.fixture(scope="session", autouse=True)
def _quiet_offline_vllm() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        logging.getLogger("vllm").setLevel(logging.ERROR)
        yield


@pytest.fixture(scope="session")
def _scripted_plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An installed distribution whose entry point is the ``scripted_disk`` module beside this file."""
    site = tmp_path_factory.mktemp("site")
    info = site / "scripted_disk-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scripted-disk\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[offload_core]\nscripted = tests.standin.scripted_disk\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield


@pytest.fixture(scope="session")
def _frozen_imports(_quiet_offline_vllm: None) -> None:
    """Keep imported modules out of the garbage collection after each test, which takes half a second otherwise."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def rig(
    _frozen_imports: None, _scripted_plugin: None, model_folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Rig]:
    """Engines on one folder of objects; after the test, no task may be left on the I/O loop."""
    io = IoLoop.acquire()
    with CallWatch().watching() as watch:
        made = Rig(model_folder, tmp_path / "kv", watch, request.node.name)
        yield made
        made.close()
    pending = io.submit(_pending_tasks()).result(60)
    io.release()
    assert pending == [], "the test left tasks behind that do not end"
    gc.collect()


async def _pending_tasks() -> list[str]:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    return [repr(task) for task in (await asyncio.wait(others, timeout=30))[1]] if others else []
