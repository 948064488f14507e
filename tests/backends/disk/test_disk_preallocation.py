"""The disk backend allocates the space of a large file before it writes it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from offload_backend_disk.folder import files

from offload_core.api import CHECK_BYTES
from tests.support.space_watcher import SpaceWatcher, skip_without_preallocation


def store(folder: Path, content: bytes, watcher: SpaceWatcher) -> None:
    files.write(f"{folder}/object", f"{folder}/object.tmp", memoryview(content), "none", seal=watcher)


def test_a_full_disk_is_found_before_a_byte_is_written(small_disk: Path) -> None:
    content = bytes(2 * CHECK_BYTES)  # is sealed in parts, and far larger than the disk
    watcher = SpaceWatcher(small_disk)
    with pytest.raises(OSError, match="No space left"):
        store(small_disk, content, watcher)
    assert not watcher.allocated_bytes
    assert not list(small_disk.iterdir())


def test_the_space_is_there_before_the_first_write(tmp_path: Path) -> None:
    content = os.urandom(2 * CHECK_BYTES)
    skip_without_preallocation(tmp_path, len(content))
    watcher = SpaceWatcher(tmp_path)
    store(tmp_path, content, watcher)
    assert (tmp_path / "object").read_bytes() == content
    assert watcher.allocated_bytes[0] >= len(content)
