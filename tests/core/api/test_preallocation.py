"""Space of large files is allocated before they are written, where the file system can do so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offload_core.api import preallocate
from offload_core.api.files.preallocation import PREALLOCATED_BYTES


def allocated_bytes(path: Path, nbytes: int) -> int:
    """Return the bytes on the disk of a new file for which ``nbytes`` were asked; its size must stay zero."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        preallocate(descriptor, nbytes)
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    assert found.st_size == 0
    return found.st_blocks * 512


def test_a_large_file_gets_its_space_and_keeps_its_size(tmp_path: Path) -> None:
    if not (got := allocated_bytes(tmp_path / "large", 2 * PREALLOCATED_BYTES)):
        pytest.skip(f"the file system of {tmp_path} does not preallocate")
    assert got >= 2 * PREALLOCATED_BYTES


def test_a_small_file_gets_none(tmp_path: Path) -> None:
    assert allocated_bytes(tmp_path / "small", PREALLOCATED_BYTES - 1) == 0


def test_a_file_system_without_it_is_no_error() -> None:
    with Path("/proc/self/comm").open("wb", buffering=0) as file:
        preallocate(file.fileno(), PREALLOCATED_BYTES)


def test_an_error_is_left_to_the_write(tmp_path: Path) -> None:
    (tmp_path / "object").touch()
    with (tmp_path / "object").open("rb") as file:
        preallocate(file.fileno(), PREALLOCATED_BYTES)
