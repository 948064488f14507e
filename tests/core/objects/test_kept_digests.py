"""Kept digests are private to a user; a file that is damaged, planted or of another user is not believed."""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from offload_core.objects.kept_digests import user_cache_folder
from tests.backends.disk.conftest import tmpfs
from tests.core.objects.digests import CACHE, MIB, identity, write
from tests.support.process_state import bytes_read


def _planted(cache: Path, model: Path) -> bytes:
    """Return the file of kept digests with a wrong digest for each file of the model, and a right checksum."""
    identity(model, cache)
    text = re.sub(rb"xxh3:\w{32}", b"xxh3:" + b"0" * 32, (cache / CACHE).read_bytes().split(b"\n", 1)[1])
    return xxhash.xxh3_128_hexdigest(text).encode() + b"\n" + text


def test_the_planted_digests_would_be_used_if_they_were_ours(model: Path, cache: Path) -> None:
    (cache / CACHE).write_bytes(_planted(cache, model))
    assert identity(model, cache) != identity(model, None)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut off": lambda data: data[: len(data) // 2],
    "a changed digest": lambda data: data.replace(b"xxh3:0", b"xxh3:1"),
    "another format": lambda data: _resealed(data.replace(b'"format": 1', b'"format": 2')),
    "no digest": lambda data: _resealed(data.replace(b"xxh3:0", b"00000")),
    "no JSON": lambda data: _resealed(b"\n{"),
    "other JSON": lambda data: _resealed(b"\n[1, 2]"),
    "entries of another type": lambda data: _resealed(b'\n{"format": 1, "digests": {"1:2:3:4:5": 7}}'),
    "deep JSON": lambda data: _resealed(b"\n" + b"[" * 100_000),
    "not text": lambda data: b"\xff" * 1000,
}


def _resealed(data: bytes) -> bytes:
    text = data.split(b"\n", 1)[1]
    return xxhash.xxh3_128_hexdigest(text).encode() + b"\n" + text


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_ignored_and_made_anew(model: Path, cache: Path, damage: str) -> None:
    (cache / CACHE).write_bytes(DAMAGE[damage](_planted(cache, model)))
    assert identity(model, cache) == identity(model, None)
    assert bytes_read(lambda: identity(model, cache)) < MIB
    assert len(json.loads((cache / CACHE).read_text().split("\n")[1])["digests"]) == 2


@pytest.mark.parametrize("way", ["others may write it", "a link", "a pipe", "a folder"])
def test_a_planted_file_is_not_read(model: Path, cache: Path, tmp_path: Path, way: str) -> None:
    planted = _planted(cache, model)
    path = cache / CACHE
    path.write_bytes(planted)
    if way == "others may write it":
        path.chmod(0o622)
    elif way == "a link":
        path.rename(tmp_path / "planted")
        path.symlink_to(tmp_path / "planted")
    else:
        path.unlink()
        os.mkfifo(path) if way == "a pipe" else path.mkdir()
    assert identity(model, cache) == identity(model, None)
    if way != "a folder":
        status = path.lstat()
        assert (stat.S_ISREG(status.st_mode), stat.S_IMODE(status.st_mode)) == (True, 0o600)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("place", ["file", "folder"])
def test_digests_of_another_user_are_not_read(
    model: Path, cache: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    (cache / CACHE).write_bytes(_planted(cache, model))
    os.chown(cache / CACHE if place == "file" else cache, 65534, -1)
    assert [identity(model, cache) for _ in range(2)] == [identity(model, None)] * 2
    assert len(caplog.records) == (place == "folder")


@pytest.mark.parametrize("way", ["others may write it", "a link", "a file"])
def test_an_unsafe_folder_is_not_used(
    model: Path, cache: Path, tmp_path: Path, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    planted = _planted(cache, model)
    (cache / CACHE).write_bytes(planted)
    if way == "others may write it":
        cache.chmod(0o777)
    else:
        cache.rename(tmp_path / "elsewhere")
        cache.symlink_to(tmp_path / "elsewhere") if way == "a link" else cache.write_bytes(b"")
    assert [identity(model, cache) for _ in range(2)] == [identity(model, None)] * 2
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert str(cache) in record.getMessage()
    assert "set XDG_CACHE_HOME" in record.getMessage()


def test_a_folder_that_cannot_be_made_is_one_warning(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    for _ in range(2):
        assert identity(model, tmp_path / "file/cache") == identity(model, None)
    (record,) = caplog.records
    assert "Not a directory" in record.getMessage()


def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tmpfs("64k") as disk:
        identity(model, disk)
        kept = (disk / CACHE).read_bytes()
        (disk / "full").write_bytes(bytes(64 * 1024 - 2 * 4096))
        for number in range(100):
            write(model / f"{number}.bin", b"content")
        assert identity(model, disk) == identity(model, None)
        assert sorted(path.name for path in disk.iterdir()) == [CACHE, "full"]
        assert (disk / CACHE).read_bytes() == kept
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage()


def test_the_folder_and_the_file_are_private(model: Path, cache: Path) -> None:
    identity(model, cache / "new")
    assert stat.S_IMODE((cache / "new").stat().st_mode) == 0o700
    assert stat.S_IMODE((cache / "new" / CACHE).stat().st_mode) == 0o600


def test_the_temporary_file_of_a_killed_engine_is_removed_later(model: Path, cache: Path) -> None:
    cache.mkdir(mode=0o700)
    for name, age in ((f"{CACHE}.0123.tmp", 7200), (f"{CACHE}.4567.tmp", 0), ("mine.tmp", 7200)):
        (cache / name).write_bytes(b"")
        os.utime(cache / name, (time.time() - age,) * 2)
    identity(model, cache)
    assert sorted(path.name for path in cache.iterdir()) == sorted([CACHE, f"{CACHE}.4567.tmp", "mine.tmp"])


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"XDG_CACHE_HOME": "/caches", "HOME": "/home/me"}, "/caches/offload-core"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/home/me"}, "/home/me/.cache/offload-core"),
        ({"XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache/offload-core"),
    ],
)
def test_the_users_cache_folder(variables: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert user_cache_folder() == Path(folder)
