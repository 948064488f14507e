"""These tests need a process of their own: a device stays registered with torch for good."""

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
from tests.support import simulated_accelerator
from tests.support.simulated_accelerator import Control

OWN_PROCESS = "OFFLOAD_CORE_TEST_ACCELERATOR"
collect_ignore_glob = [] if OWN_PROCESS in os.environ else ["test_*.py"]


@pytest.fixture(scope="session")
def registered() -> Control:
    return simulated_accelerator.register()


@pytest.fixture
def control(registered: Control) -> Iterator[Control]:
    yield registered
    torch.accelerator.synchronize()
