"""The tests of ``tests/accelerator``, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.accelerator.conftest import OWN_PROCESS
from tests.support import simulated_accelerator
from tests.support.paths import ROOT


@pytest.mark.timeout(600)  # to compile the device takes a quarter of a minute, and minutes on a busy machine
@pytest.mark.skipif(simulated_accelerator.why_not() is not None, reason=str(simulated_accelerator.why_not()))
@pytest.mark.parametrize("selected", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_copies_on_a_simulated_accelerator(selected: str) -> None:
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", selected, "tests/accelerator"],
        cwd=ROOT,
        env={**os.environ, OWN_PROCESS: "1"},
        capture_output=True,
        text=True,
    )
    assert tests.returncode == 0, f"{tests.stdout}\n{tests.stderr}"
