"""Blocking file operations on objects; each runs on one of the tier's threads, one hop per batch."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from offload_core.backend import LoadOutcome, StoreOutcome

FOLDER_MODE = 0o700
FILE_MODE = 0o600
OBJECT_SUFFIX = ".kv"
TEMPORARY_SUFFIX = ".tmp"

_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_PACK = re.compile(r"[a-z0-9-]{1,64}")
_PREFIX = re.compile(r"[0-9a-f]{2}")
_DIGEST = re.compile(r"(?:[0-9a-f]{2}){1,64}")


def exist(paths: list[Path]) -> list[bool]:
    """Return, per path, whether a regular file is there."""
    return [path.is_file() for path in paths]


def load_all(paths: Sequence[Path], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
    """Load every path into its buffer, in order."""
    return [load(path, buffer) for path, buffer in zip(paths, buffers, strict=True)]


def store_all(paths: Sequence[Path], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
    """Store every buffer under its path, in order; the first error ends the batch."""
    return [store(path, buffer) for path, buffer in zip(paths, buffers, strict=True)]


def load(path: Path, buffer: memoryview) -> LoadOutcome:
    """Read the file into ``buffer``. A file of another size is corrupt; the buffer's content is then undefined."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return LoadOutcome.MISS
    try:
        if os.fstat(descriptor).st_size != len(buffer):
            return LoadOutcome.CORRUPT
        done = 0
        while done < len(buffer):
            count = os.readv(descriptor, [buffer[done:]])
            if count == 0:  # truncated since the fstat
                return LoadOutcome.CORRUPT
            done += count
    finally:
        os.close(descriptor)
    return LoadOutcome.HIT


def store(path: Path, buffer: memoryview) -> StoreOutcome:
    """Write the file whole or not at all: to a temporary name of its own in the same folder, then renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid():x}-{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    descriptor = _create(temporary)
    try:
        try:
            done = 0
            while done < len(buffer):
                done += os.write(descriptor, buffer[done:])
        finally:
            os.close(descriptor)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    return StoreOutcome.STORED


def delete(paths: list[Path]) -> None:
    """Remove files; absent ones are no error."""
    for path in paths:
        path.unlink(missing_ok=True)


def object_folders(root: Path) -> list[Path]:
    """Return the folders ``namespace/pack/ab`` under ``root`` that may hold objects."""
    folders = [root]
    for name in (_NAMESPACE, _PACK, _PREFIX):
        folders = [Path(entry.path) for folder in folders for entry in _scan(folder) if name.fullmatch(entry.name)]
    return folders


def objects_in(folder: Path) -> list[tuple[str, int, float]]:
    """Return the objects in one folder: their hex digest, their size in bytes and when they were written."""
    found: list[tuple[str, int, float]] = []
    for entry in _scan(folder):
        digest = entry.name.removesuffix(OBJECT_SUFFIX)
        if digest == entry.name or not _DIGEST.fullmatch(digest) or digest[:2] != folder.name:
            continue
        with suppress(FileNotFoundError):  # deleted meanwhile
            if entry.is_file(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                found.append((digest, status.st_size, status.st_mtime))
    return found


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):  # deleted meanwhile, or a foreign file
        return []


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, FILE_MODE)
    except FileNotFoundError:
        make_private_folder(path.parent)
        return os.open(path, flags, FILE_MODE)


def make_private_folder(folder: Path) -> None:
    """Create ``folder`` and its missing parents, each with mode 0700 whatever the umask says."""
    for parent in reversed([folder, *folder.parents]):
        if not parent.is_dir():
            try:
                parent.mkdir(mode=FOLDER_MODE)
                parent.chmod(FOLDER_MODE)
            except FileExistsError:
                if not parent.is_dir():  # else another process was faster
                    raise
