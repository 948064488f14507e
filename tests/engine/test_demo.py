"""What `make demo` runs once everything is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT


@pytest.mark.long
def test_the_demo_is_served_from_disk_with_the_same_outputs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.demo", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same as without offloading" in " ".join(done.stdout.split())
