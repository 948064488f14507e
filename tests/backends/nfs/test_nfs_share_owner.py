"""The folder of a mounted share: other users must not control it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from offload_backend_nfs.storage.posix import MARKER, PosixShare

from offload_core.api.backend import LoadOutcome


def open_share(root: Path) -> PosixShare:
    share = PosixShare(root)
    share.open()
    return share


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o2775, 0o1777], ids=oct)
def test_a_share_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    root = tmp_path / "kv"
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(PermissionError, match=rf"mode {mode:04o}.*such as 0700.*chmod go-w"):
        open_share(root)
    assert list(root.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_the_share_of_another_user_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    root.mkdir()
    os.chown(root, 65534, 65534)
    with pytest.raises(PermissionError, match=r"uid 65534.*must be root.*chown"):
        open_share(root)
    assert list(root.iterdir()) == []


def test_a_share_below_a_sticky_folder_and_a_link_to_it_are_good(tmp_path: Path) -> None:
    (tmp_path / "sticky").mkdir()
    (tmp_path / "sticky").chmod(0o1777)
    root = tmp_path / "sticky" / "kv"
    (tmp_path / "link").symlink_to(root)
    open_share(root)
    open_share(tmp_path / "link")
    assert (root / MARKER).stat().st_mode & 0o777 == 0o600


def test_a_link_or_a_fifo_in_place_of_an_object_is_no_hit(tmp_path: Path) -> None:
    share = open_share(tmp_path / "kv")
    (tmp_path / "victim").write_bytes(b"data")
    (tmp_path / "kv" / "link").symlink_to(tmp_path / "victim")
    os.mkfifo(tmp_path / "kv" / "fifo")
    assert share.load("link", memoryview(bytearray(4))) is LoadOutcome.MISS
    reading = asyncio.wait_for(asyncio.to_thread(share.load, "fifo", memoryview(bytearray(4))), 10)
    assert asyncio.run(reading) is not LoadOutcome.HIT


def test_the_folder_of_a_disk_tier_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".offload-core").mkdir()
    (tmp_path / ".offload-core" / "account.sqlite").touch()
    with pytest.raises(OSError, match="disk tier; choose another folder"):
        open_share(tmp_path)
