"""Digests of files that were read before, in a file of the user's cache folder that the engines of a host share."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

logger = logging.getLogger(__name__)

_FILE = "file-digests.json"
_FORMAT = 1
_MAX_BYTES = 16 * 1024 * 1024
_MAX_ENTRIES = 50_000
_TEMPORARY = re.compile(re.escape(_FILE) + r"\.\w+\.tmp")
_STALE_SECONDS = 3600
_KEY = re.compile(r"\d+(:-?\d+){4}")
_DIGEST = re.compile(r"xxh3:[0-9a-f]{32}")
_warned: set[str] = set()


@dataclass(frozen=True)
class FileState:
    """The state of a file by its times, which every change of its content changes.

    Args:
        key: device, inode, size, and modification and change times in nanoseconds.
        changed_ns: the change time. No program can set it, other than the modification time.
    """

    key: str
    changed_ns: int

    @staticmethod
    def of(status: os.stat_result) -> FileState:
        """Return the state that ``status`` shows."""
        parts = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        return FileState(":".join(map(str, parts)), status.st_ctime_ns)

    def settled(self, now_ns: int, seconds: float) -> bool:
        """Return whether a later change of the content must change the times as well.

        A file that has just changed can change again within one tick of the file system's clock. File systems that
        count whole seconds are never trusted. Some of them are images with the same times in every build, or mounts of
        object stores without a change time.
        """
        return now_ns - self.changed_ns >= seconds * 1e9 and self.changed_ns % 1_000_000_000 != 0


class KeptDigests:
    """The digests that this user's engines have computed on this host.

    Only a file of this user that others cannot write is read. Any other file, or a damaged one, counts as empty.
    Without a usable folder nothing is kept, with one warning.

    Args:
        folder: the folder of the file; it is created with mode 0700.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._digests: dict[str, tuple[str, int]] = {}

    def load(self) -> None:
        """Read the file anew, if there is a usable one."""
        if self._folder is not None:
            try:
                with _opened(self._folder, create=False) as folder:
                    self._digests = {**self._digests, **_read(folder)}
            except FileNotFoundError:
                pass
            except OSError as error:
                _warn(str(self._folder), error.strerror or str(error))

    def get(self, state: FileState) -> str | None:
        """Return the digest of a file in this state, or ``None``."""
        found = self._digests.get(state.key)
        if found is None:
            return None
        self._digests[state.key] = (found[0], int(time.time()))
        return found[0]

    def add(self, digests: Mapping[FileState, str]) -> None:
        """Keep digests, together with those that other engines have written meanwhile."""
        now = int(time.time())
        own = {**self._digests, **{state.key: (digest, now) for state, digest in digests.items()}}
        self._digests = own
        if self._folder is None or not digests:
            return
        try:
            with _opened(self._folder, create=True) as folder:
                merged = {**_read(folder), **own}
                newest = sorted(merged.items(), key=lambda item: item[1][1], reverse=True)[:_MAX_ENTRIES]
                _write(folder, dict(newest))
        except OSError as error:
            _warn(str(self._folder), error.strerror or str(error))


def user_cache_folder() -> Path | None:
    """Return the folder of this user's kept digests, or ``None`` if the user has no home folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "offload-core"  # noqa: PTH117
    except RuntimeError as error:
        _warn("~/.cache/offload-core", str(error))
        return None


def _warn(folder: str, problem: str) -> None:
    if folder in _warned:
        return
    _warned.add(folder)
    logger.warning(
        "digests of the model's files are not kept in %s, so each start reads these files again: %s; set "
        "XDG_CACHE_HOME to a folder of this user that others cannot write, or set model_identity",
        folder,
        problem,
    )


@contextmanager
def _opened(path: Path, *, create: bool) -> Iterator[int]:
    """Open a folder that only this user can write.

    Raises:
        FileNotFoundError: it does not exist, and ``create`` is false.
        OSError: it cannot be opened, or others can write it.
    """
    if create:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not _ours_alone(os.fstat(descriptor)):
            raise PermissionError(f"{path} belongs to another user, or others can write it")
        yield descriptor
    finally:
        os.close(descriptor)


def _ours_alone(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _read(folder: int) -> dict[str, tuple[str, int]]:
    """Return the digests of the file in ``folder``, each with the time of its last use in seconds since 1970."""
    try:
        status = os.stat(_FILE, dir_fd=folder, follow_symlinks=False)
        if not (stat.S_ISREG(status.st_mode) and _ours_alone(status) and status.st_size <= _MAX_BYTES):
            return {}
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(_FILE, flags, dir_fd=folder), "rb") as file:
            checksum, _, text = file.read(_MAX_BYTES).partition(b"\n")
    except OSError:
        return {}
    if checksum != xxhash.xxh3_128_hexdigest(text).encode():
        return {}
    try:
        content: Any = json.loads(text)
        if content["format"] != _FORMAT:
            return {}
        digests = {key: (digest, int(used)) for key, (digest, used) in content["digests"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}
    if not all(_KEY.fullmatch(key) and _DIGEST.fullmatch(str(digest)) for key, (digest, _) in digests.items()):
        return {}
    return digests


def _write(folder: int, digests: dict[str, tuple[str, int]]) -> None:
    """Replace the file at once, and remove the temporary files of killed processes."""
    for name in filter(_TEMPORARY.fullmatch, os.listdir(folder)):
        with suppress(FileNotFoundError):  # another engine has renamed or removed it
            if time.time() - os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime > _STALE_SECONDS:
                os.unlink(name, dir_fd=folder)
    text = json.dumps({"format": _FORMAT, "digests": digests}, sort_keys=True).encode()
    temporary = f"{_FILE}.{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o600, dir_fd=folder), "wb") as file:
            file.write(xxhash.xxh3_128_hexdigest(text).encode() + b"\n" + text)
        os.replace(temporary, _FILE, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
