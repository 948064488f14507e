"""A small model, and a folder for the digests of its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.objects.digests import write


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder / "weights.bin", b"weights")
    write(folder / "config.json", b"{}")
    return folder
