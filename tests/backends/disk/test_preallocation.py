"""Space of large files is allocated before they are written, where the file system can do so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from offload_backend_disk.folder import files
from offload_backend_disk.folder.preallocation import MIN_BYTES, preallocate

from offload_core.api import CHECK_BYTES, StoreSeal


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
    if not (got := allocated_bytes(tmp_path / "large", 2 * MIN_BYTES)):
        pytest.skip(f"the file system of {tmp_path} does not preallocate")
    assert got >= 2 * MIN_BYTES


def test_a_small_file_gets_none(tmp_path: Path) -> None:
    assert allocated_bytes(tmp_path / "small", MIN_BYTES - 1) == 0


def test_a_file_system_without_it_is_no_error() -> None:
    with Path("/proc/self/comm").open("wb", buffering=0) as file:
        preallocate(file.fileno(), MIN_BYTES)


def test_an_error_is_left_to_the_write(tmp_path: Path) -> None:
    (tmp_path / "object").touch()
    with (tmp_path / "object").open("rb") as file:
        preallocate(file.fileno(), MIN_BYTES)


def test_a_full_disk_is_found_before_a_byte_is_written(small_disk: Path) -> None:
    content = bytes(2 * CHECK_BYTES)  # is sealed in parts, and far larger than the disk
    watcher = Watcher(small_disk / "object.tmp")
    with pytest.raises(OSError, match="No space left"):
        files.write(
            str(small_disk / "object"), str(small_disk / "object.tmp"), memoryview(content), "none", seal=watcher
        )
    assert not watcher.allocated_bytes
    assert not list(small_disk.iterdir())


class Watcher(StoreSeal):
    """Notes the space of a file before the first byte is written."""

    head_bytes = 0

    def __init__(self, temporary: Path) -> None:
        self._temporary = temporary
        self.allocated_bytes: list[int] = []

    def stored(self, nbytes: int) -> None:
        self.allocated_bytes.append(self._temporary.stat().st_blocks * 512)

    def seal(self) -> None:
        """The bytes are right as they are."""


def test_a_store_allocates_before_it_writes(tmp_path: Path) -> None:
    if not allocated_bytes(tmp_path / "large", 2 * MIN_BYTES):
        pytest.skip(f"the file system of {tmp_path} does not preallocate")
    content = os.urandom(2 * MIN_BYTES)
    watcher = Watcher(tmp_path / "object.tmp")
    files.write(str(tmp_path / "object"), str(tmp_path / "object.tmp"), memoryview(content), "none", seal=watcher)
    assert (tmp_path / "object").read_bytes() == content
    assert watcher.allocated_bytes[0] >= 2 * MIN_BYTES
