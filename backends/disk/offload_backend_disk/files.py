"""Blocking operations on single files."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

from offload_core.backend import LoadOutcome

FOLDER_MODE = 0o700
FILE_MODE = 0o600

Fsync = Literal["none", "data", "data and folder"]


def open_to_read(path: Path) -> int | None:
    """Return a descriptor of the file, or ``None`` where there is none. What is open is not lost when it is removed."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None


def read(descriptor: int, buffer: memoryview) -> LoadOutcome:
    """Read the whole file into ``buffer``. One of another size is corrupt; the buffer's content is then undefined."""
    if os.fstat(descriptor).st_size != len(buffer):
        return LoadOutcome.CORRUPT
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], done)
        if count == 0:  # truncated since the fstat
            return LoadOutcome.CORRUPT
        done += count
    return LoadOutcome.HIT


def write(path: Path, temporary: Path, buffer: memoryview, fsync: Fsync) -> None:
    """Write the file whole or not at all: under a temporary name in the same folder, then renamed."""
    descriptor = _create(temporary)
    try:
        try:
            done = 0
            while done < len(buffer):
                done += os.write(descriptor, buffer[done:])
            if fsync != "none":
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    if fsync == "data and folder":
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
