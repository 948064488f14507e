"""A process grows by the configured sizes of staging and cpu tier, plus a tenth of them for everything else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("staging_bytes", "capacity_bytes", "stored_bytes"),
    [
        pytest.param(48 * MIB, 96 * MIB, 200 * MIB, id="a little"),
        pytest.param(256 * MIB, 512 * MIB, 4096 * MIB, id="much", marks=[pytest.mark.long, pytest.mark.timeout(600)]),
    ],
)
def test_peak_memory_grows_by_staging_and_capacity_and_a_tenth_at_most(
    tmp_path: Path, staging_bytes: int, capacity_bytes: int, stored_bytes: int
) -> None:
    arguments = map(str, (tmp_path, staging_bytes, capacity_bytes, stored_bytes))
    command = [sys.executable, "-m", "tests.backends.cpu.memory_child", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr
    grown = dict(re.findall(r"^(\w+) (\d+)$", done.stdout, re.MULTILINE))
    assert grown.keys() == {"mixed", "small"}
    for load, nbytes in grown.items():
        assert int(nbytes) > capacity_bytes, f"{load}: the load filled the tier"
        assert int(nbytes) <= 1.1 * (staging_bytes + capacity_bytes), f"{load}: {done.stdout}"
