"""A seal that notes how much space a folder has when a store reads its first bytes, before it writes any."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offload_core.api import StoreSeal, preallocate


class SpaceWatcher(StoreSeal):
    """Notes the allocated bytes of all files in a folder.

    Attributes:
        allocated_bytes: one number for each part of the object.
    """

    head_bytes = 0

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.allocated_bytes: list[int] = []

    def stored(self, nbytes: int) -> None:
        self.allocated_bytes.append(sum(path.stat().st_blocks * 512 for path in self._folder.rglob("*")))

    def seal(self) -> None:
        """The bytes are right as they are."""


def skip_without_preallocation(folder: Path, nbytes: int) -> None:
    """Skip the test if the folder's file system does not allocate space beforehand."""
    path = folder / "try-to-allocate"
    with path.open("wb") as file:
        preallocate(file.fileno(), nbytes)
        allocated_blocks = os.fstat(file.fileno()).st_blocks
    path.unlink()
    if not allocated_blocks:
        pytest.skip(f"the file system of {folder} does not preallocate")
