"""The cost of the public door: an import of it loads nothing that a plugin does not need."""

from __future__ import annotations

import subprocess
import sys


def test_the_public_door_loads_no_heavy_library() -> None:
    heavy = {"torch", "vllm", "numpy", "fsspec", "hypothesis", "pytest", "rich", "typer", "yaml", "zstandard"}
    script = f"import sys, offload_core.api; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
