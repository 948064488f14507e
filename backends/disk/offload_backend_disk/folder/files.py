"""Blocking operations on single files. Paths are strings in hot paths: pathlib costs more than some system calls."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Literal

from offload_backend_disk.folder import direct_io
from offload_core.api import CHECK_BYTES, LoadCheck, LoadOutcome, StoreSeal, preallocate

FOLDER_MODE = 0o700
FILE_MODE = 0o600
DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors that mean a full disk or quota, and nothing worse."""

Fsync = Literal["none", "data", "data and folder"]


def open_to_read(path: str, *, direct: bool = False) -> tuple[int, int] | None:
    """Return a descriptor of a regular file and its bytes, or ``None`` if there is none.

    An open file survives its removal.

    Links are not followed, and the call waits for no writer of a FIFO.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_DIRECT if direct else 0)
    try:
        descriptor = os.open(path, flags)
    except (FileNotFoundError, NotADirectoryError):
        return None
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode):
        return descriptor, found.st_size
    os.close(descriptor)
    return None


def read(descriptor: int, buffer: memoryview, *, direct: bool = False) -> LoadOutcome:
    """Read the whole file into ``buffer``. A file of another size is corrupt; the buffer's content is then undefined.

    Args:
        direct: the descriptor has ``O_DIRECT``, and the buffer is aligned for it.
    """
    done = direct_io.read(descriptor, buffer) if direct else 0
    if direct and done < len(buffer):  # truncated, or interrupted
        direct_io.clear_direct(descriptor)
    beyond = bytearray(1)  # shows, without another system call, that the file is longer
    while done < len(buffer) or not (direct or done):  # once at least, for an empty object
        count = os.preadv(descriptor, [buffer[done:], beyond], done)
        done += count
        if count == 0:
            break
    return LoadOutcome.HIT if done == len(buffer) else LoadOutcome.CORRUPT


def read_and_check(descriptor: int, nbytes: int, buffer: memoryview, check: LoadCheck) -> LoadOutcome:
    """Read the whole file of ``nbytes`` bytes as :func:`read` does, in parts that are checked at once."""
    if nbytes != len(buffer):
        return LoadOutcome.CORRUPT
    done = 0
    while left := len(buffer) - done:
        part = buffer[done:] if left < 2 * CHECK_BYTES else buffer[done : done + CHECK_BYTES]
        count = os.preadv(descriptor, [part], done)
        if count == 0:  # truncated since it was opened
            return LoadOutcome.CORRUPT
        check.filled(count)
        done += count
    return LoadOutcome.HIT


def write(
    path: str,
    temporary: str,
    buffer: memoryview,
    fsync: Fsync,
    *,
    direct: bool = False,
    seal: StoreSeal | None = None,
) -> None:
    """Write the file whole or not at all: under a temporary name in the same folder, then renamed.

    Args:
        direct: write past the page cache; the buffer is aligned for it.
        seal: seals the buffer meanwhile.

    Raises:
        FileNotFoundError: the folder does not exist.
        OSError: the disk failed, or is full.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    descriptor = os.open(temporary, flags, FILE_MODE)
    try:
        try:
            if direct:
                if seal is not None:
                    seal.seal()
                direct_io.write(descriptor, buffer)
            else:
                preallocate(descriptor, len(buffer))
                for offset, part in [(0, buffer)] if seal is None else seal.parts(buffer):
                    _write_part(descriptor, part, offset)
            if fsync != "none":
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)  # noqa: PTH105 - pathlib is slow
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108 - pathlib is slow
        raise
    if fsync == "data and folder":
        _sync_folder(os.path.dirname(path))  # noqa: PTH120 - pathlib is slow


def make_private_folder(folder: str | Path) -> None:
    """Create ``folder`` with mode 0700 regardless of the umask, unless it exists. Its parent must exist."""
    folder = Path(folder)
    if not folder.is_dir():
        try:
            folder.mkdir(mode=FOLDER_MODE)
            folder.chmod(FOLDER_MODE)
        except FileExistsError:
            if not folder.is_dir():  # else another process was faster
                raise


def _write_part(descriptor: int, part: memoryview, offset: int) -> None:
    done = 0
    while done < len(part):
        done += os.pwrite(descriptor, part[done:], offset + done)


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
