"""The tests of ``tests/accelerator``, in a process of their own for each device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.support import simulated_accelerator
from tests.support.accelerator import CUDA, OWN_PROCESS, SIMULATED
from tests.support.paths import ROOT

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "timeout_func_only=true"]
"""The limit of the first test is not that of the compilation, which is in its fixture."""
CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""Hardware queues of a GPU. Streams that share one wait for each other, so a held stream would hold others."""


@pytest.mark.parametrize(
    "device",
    [
        pytest.param(SIMULATED, marks=pytest.mark.skipif(bool(simulated_accelerator.why_not()), reason="no compiler")),
        pytest.param(CUDA, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA GPU")),
    ],
)
@pytest.mark.parametrize(
    "selected",
    [  # to compile the simulated device takes minutes on a busy machine; the inner tests have limits of their own
        pytest.param("not long", marks=pytest.mark.timeout(1200)),
        pytest.param("long", marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
    ],
)
def test_copies_on_an_accelerator(device: str, selected: str) -> None:
    tests = subprocess.run(
        [*PYTEST, "-m", selected, "tests/accelerator"],
        cwd=ROOT,
        env={**os.environ, **CONNECTIONS, OWN_PROCESS: device},
        capture_output=True,
        text=True,
    )
    assert tests.returncode == 0, f"{tests.stdout}\n{tests.stderr}"
