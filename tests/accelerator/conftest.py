"""These tests need a process of their own: the simulated device stays registered with torch for good."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.standin.conftest import (  # noqa: F401 - fixtures
    _frozen_imports,
    _quiet_offline_vllm,
    _scripted_plugin,
    model_folder,
    rig,
)
from tests.support import accelerator
from tests.support.accelerator import OWN_PROCESS, StreamControl

collect_ignore_glob = [] if OWN_PROCESS in os.environ else ["test_*.py"]


@pytest.fixture(scope="session")
def registered() -> StreamControl:
    return accelerator.start()


@pytest.fixture
def control(registered: StreamControl) -> Iterator[StreamControl]:
    yield registered
    torch.accelerator.synchronize()
