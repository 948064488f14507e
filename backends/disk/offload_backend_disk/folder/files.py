"""Blocking operations on single files. Names are strings in hot paths: pathlib costs more than some system calls."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Literal

from offload_backend_disk.folder import direct_io
from offload_core.api import LoadOutcome

FOLDER_MODE = 0o700
FILE_MODE = 0o600

Fsync = Literal["none", "data", "data and folder"]


def exists(name: str) -> bool:
    """Return whether the file is there. What keeps us from telling is an ``OSError``."""
    try:
        return stat.S_ISREG(os.stat(name).st_mode)  # noqa: PTH116 - pathlib is slow
    except (FileNotFoundError, NotADirectoryError):
        return False


def open_to_read(name: str | Path, *, direct: bool = False) -> int | None:
    """Return a descriptor of the file, or ``None`` where there is none. What is open is not lost when it is removed."""
    try:
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    except (FileNotFoundError, NotADirectoryError):
        return None


def read(descriptor: int, buffer: memoryview, *, direct: bool = False) -> LoadOutcome:
    """Read the whole file into ``buffer``. One of another size is corrupt; the buffer's content is then undefined.

    Args:
        direct: the descriptor has ``O_DIRECT``, and the buffer is aligned for it.
    """
    done = direct_io.read(descriptor, buffer) if direct else 0
    if direct and done < len(buffer):  # truncated, or interrupted
        direct_io.end_direct(descriptor)
    beyond = bytearray(1)  # to see, without another system call, that the file is longer
    while done < len(buffer) or not (direct or done):  # once at least, for an empty object
        count = os.preadv(descriptor, [buffer[done:], beyond], done)
        done += count
        if count == 0:
            break
    return LoadOutcome.HIT if done == len(buffer) else LoadOutcome.CORRUPT


def write(name: str, temporary: str, buffer: memoryview, fsync: Fsync, *, direct: bool = False) -> None:
    """Write the file whole or not at all: under a temporary name in the same folder, then renamed.

    Args:
        direct: past the page cache; the buffer is aligned for it.
    """
    descriptor = _create(temporary, os.O_DIRECT if direct else 0)
    try:
        try:
            if direct:
                direct_io.write(descriptor, buffer)
            else:
                done = 0
                while done < len(buffer):
                    done += os.write(descriptor, buffer[done:])
            if fsync != "none":
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, name)  # noqa: PTH105 - pathlib is slow
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108
        raise
    if fsync == "data and folder":
        _sync_folder(os.path.dirname(name))  # noqa: PTH120


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _create(name: str, more_flags: int) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | more_flags
    try:
        return os.open(name, flags, FILE_MODE)
    except FileNotFoundError:
        make_private_folder(Path(name).parent)
        return os.open(name, flags, FILE_MODE)


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
