"""Configurations of our backend for SGLang, and a tier in memory that the checks can hold and break."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.memory_backend import MemoryBackend, memory_config

DEADLINES = dict.fromkeys(("lookup_timeout_seconds", "load_timeout_seconds", "store_timeout_seconds"), 0.8)
LONG = dict.fromkeys(DEADLINES, 30)


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    """Return the keys of a tier on disk."""
    disk = {"name": "nvme", "type": "disk", "path": str(folder / "kv")}
    return {"staging_bytes": "32MiB", "model_identity": "a-model", "io_process": "off", "backends": [disk], **more}


def use_memory(monkeypatch: pytest.MonkeyPatch, **common: object) -> list[MemoryBackend]:
    """Give all backends a tier in memory; returns the list to which each one's medium is appended."""
    from offload_core.elsewhere import sglang_hicache

    config, made = memory_config(**common)
    monkeypatch.setattr(sglang_hicache, "load_config", lambda keys, source: config)
    return made
