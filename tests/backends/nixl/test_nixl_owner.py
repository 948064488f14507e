"""The folder of a nixl tier: other users must not control it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from tests.backends.nixl.conftest import Nixl


@pytest.fixture
def root(folder_options: dict[str, Any]) -> Path:
    root = Path(folder_options["path"])
    root.mkdir()
    return root


@pytest.mark.parametrize("mode", [0o777, 0o2775, 0o1777], ids=oct)
def test_a_folder_that_others_may_write_to_is_refused(
    nixl: Nixl, folder_options: dict[str, Any], root: Path, mode: int
) -> None:
    root.chmod(mode)
    backend = nixl(**folder_options)
    with pytest.raises(PermissionError, match=rf"mode {mode:04o}.*such as 0700.*chmod go-w"):
        asyncio.run(backend.open())
    asyncio.run(backend.close())
    assert list(root.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_the_folder_of_another_user_is_refused(nixl: Nixl, folder_options: dict[str, Any], root: Path) -> None:
    os.chown(root, 65534, 65534)
    backend = nixl(**folder_options)
    with pytest.raises(PermissionError, match=r"uid 65534.*must be root.*chown"):
        asyncio.run(backend.open())
    asyncio.run(backend.close())
    assert list(root.iterdir()) == []
