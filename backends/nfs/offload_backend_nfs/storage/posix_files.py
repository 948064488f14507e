"""Blocking operations on single files of a share. None of them waits for a FIFO."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress

from offload_backend_nfs.storage.base import Entry
from offload_backend_nfs.storage.failures import ForeignFileError
from offload_core.api import CHECK_BYTES, LoadCheck, LoadOutcome

FOLDER_MODE = 0o700
MISSING_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
NO_FOLDER_ERRNOS = (errno.ENOENT, errno.ENOTDIR)
"""A listing that ends in ESTALE is not complete. A retry opens the folder again."""
_OPEN_TO_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""No link is followed. A FIFO is opened at once, and recognized by its status."""


def read_object(path: str, buffer: memoryview, check: LoadCheck | None) -> LoadOutcome:
    """Read a file into ``buffer``, in parts if they are checked. Anything but a regular file is a miss."""
    descriptor = os.open(path, _OPEN_TO_READ)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return LoadOutcome.MISS
        if status.st_size != len(buffer):
            return LoadOutcome.CORRUPT
        done = 0
        while left := len(buffer) - done:
            part = buffer[done:] if check is None or left < 2 * CHECK_BYTES else buffer[done : done + CHECK_BYTES]
            count = os.preadv(descriptor, [part], done)
            if count == 0:  # truncated since the fstat
                return LoadOutcome.CORRUPT
            if check is not None:
                check.filled(count)
            done += count
    finally:
        with suppress(OSError):  # the bytes are read; another try would overwrite those that a check has found right
            os.close(descriptor)
    return LoadOutcome.HIT


def read_small_file(path: str, max_bytes: int) -> bytes:
    """Return the content of a regular file of at most ``max_bytes``.

    Raises:
        ForeignFileError: it is larger, or is no regular file.
    """
    try:
        descriptor = os.open(path, _OPEN_TO_READ)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise ForeignFileError(errno.EINVAL, f"it cannot be opened ({error.strerror})", path) from error
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ForeignFileError(errno.EINVAL, "it is no regular file", path)
        if status.st_size > max_bytes:
            raise ForeignFileError(errno.EINVAL, f"it has {status.st_size} bytes, more than {max_bytes}", path)
        content = bytearray()
        while len(content) <= max_bytes and (part := os.read(descriptor, max_bytes + 1 - len(content))):
            content += part
    finally:
        os.close(descriptor)
    if len(content) > max_bytes:
        raise ForeignFileError(errno.EINVAL, f"it has more than {max_bytes} bytes", path)
    return bytes(content)


def holds_no_file(path: str) -> bool:
    """Return whether something exists that is no regular file."""
    try:
        return not stat.S_ISREG(os.lstat(path).st_mode)
    except OSError as error:
        if error.errno not in MISSING_ERRNOS:
            raise
        return False


def size_of(path: str) -> int | None:
    """Return the bytes of a regular file, or ``None`` if there is none."""
    for _ in range(2):
        try:
            status = os.lstat(path)
        except OSError as error:
            if error.errno not in MISSING_ERRNOS:
                raise
            if error.errno != errno.ESTALE:
                break
        else:
            return status.st_size if stat.S_ISREG(status.st_mode) else None
    return None


def list_folder(folder: str, progress: Callable[[], None] = lambda: None) -> list[Entry]:
    """Return the regular files and folders in a folder, all of them or none if there is no folder.

    Args:
        progress: called for each entry.
    """
    try:
        entries = os.scandir(folder)
    except OSError as error:
        if error.errno not in NO_FOLDER_ERRNOS:
            raise
        return []
    found: list[Entry] = []
    with entries:
        for entry in entries:
            progress()
            with suppress(FileNotFoundError):  # deleted meanwhile
                status = _status_of(entry)
                is_folder = stat.S_ISDIR(status.st_mode)
                if is_folder or stat.S_ISREG(status.st_mode):
                    found.append(Entry(entry.name, is_folder, status.st_size, status.st_mtime))
    return found


def _status_of(entry: os.DirEntry[str]) -> os.stat_result:
    try:
        return entry.stat(follow_symlinks=False)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
    return os.lstat(entry.path)  # another host has just replaced it


def make_private_folder(folder: str) -> None:
    """Make a folder with mode 0700, unless it exists."""
    try:
        os.mkdir(folder, FOLDER_MODE)  # noqa: PTH102
    except FileExistsError:
        if not os.path.isdir(folder):  # noqa: PTH112 - another process may have made it
            raise
    else:
        os.chmod(folder, FOLDER_MODE)  # noqa: PTH101 - whatever the umask says


def unlink(path: str) -> bool:
    """Remove a file, and return whether there was one. A folder is none and stays."""
    try:
        os.unlink(path)  # noqa: PTH108
    except OSError as error:
        if error.errno not in (*MISSING_ERRNOS, errno.EISDIR):
            raise
        return False
    return True


def unlink_quietly(path: str) -> None:
    """Remove a file if that is possible."""
    with suppress(OSError):
        os.unlink(path)  # noqa: PTH108
