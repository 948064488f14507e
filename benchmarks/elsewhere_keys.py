"""The configuration of our tiers below another system, for the benchmarks of these systems."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def disk_keys(folder: Path, *, io_process: str, direct_io: str) -> dict[str, Any]:
    """Return the keys for one ``disk`` tier in a folder of its own below ``folder``."""
    path = str(folder / f"ours-{io_process}-{direct_io}")
    backend = {"name": "disk", "type": "disk", "path": path, "direct_io": direct_io}
    return {"model_identity": "benchmark", "io_process": io_process, "backends": [backend]}
