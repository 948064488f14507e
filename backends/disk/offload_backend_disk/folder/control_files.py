"""The control files of a folder, such as lock files and the account.

They are private under every umask, are never reached through a link, and are locked under a deadline. A process that
is forked without exec has none of them open. Otherwise the locks of a killed process would live as long as its child.

Everything here blocks, on any thread.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from offload_backend_disk.folder.files import FILE_MODE, FOLDER_MODE, make_private_folder
from offload_core.api import TierLogger, check_ownership

LOCK_SECONDS = 1.0
"""The longest wait for a lock that another process holds."""

DAMAGED_SUFFIX = ".damaged"

_SHORTEST_PAUSE_SECONDS = 0.0005
_LONGEST_PAUSE_SECONDS = 0.02
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_NOT_A_FILE_ERRNOS = (errno.ELOOP, errno.EISDIR, errno.ENXIO)

_open_descriptors: set[int] = set()


def _close_all_in_child() -> None:
    for descriptor in _open_descriptors:
        with suppress(OSError):
            os.close(descriptor)
    _open_descriptors.clear()


os.register_at_fork(after_in_child=_close_all_in_child)


def open_control_file(path: Path, log: TierLogger, flags: int = os.O_RDONLY) -> int:
    """Open a control file, created if it is missing; close it with :func:`close_control_file`.

    Anything else of that name, such as a link or a file of another user, is set aside first.

    Args:
        flags: the access mode, and more flags such as ``O_EXCL``.

    Raises:
        OSError: the folder cannot be written.
    """
    descriptor = _try_to_open(path, flags)
    if descriptor is None:
        set_aside(path, "it is no file of this process's user", log)
        descriptor = _try_to_open(path, flags)
    if descriptor is None:
        raise OSError(errno.EPERM, "not a file of this process's user; remove it", str(path))
    return descriptor


def close_control_file(descriptor: int) -> None:
    """Close a control file. A child of the process that opened it has it closed already."""
    if descriptor in _open_descriptors:
        _open_descriptors.discard(descriptor)  # first: the number may soon be another file's, even if the close fails
        with suppress(OSError):  # after an unmount even a close may fail
            os.close(descriptor)


@contextmanager
def locked(path: Path, seconds: float, log: TierLogger) -> Iterator[None]:
    """Hold the lock on a control file.

    Args:
        seconds: the longest wait for it.

    Raises:
        TimeoutError: another process holds it.
        OSError: the folder cannot be written.
    """
    descriptor = open_control_file(path, log)
    try:
        _lock(descriptor, path, seconds)
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was just forked may have it open for a moment
    finally:
        close_control_file(descriptor)


def make_control_folder(folder: Path) -> None:
    """Create a private folder for control files, or check and correct the one that exists.

    Raises:
        PermissionError: it is a link, or belongs to another user.
        OSError: it cannot be created.
    """
    make_private_folder(folder)
    check_control_folder(folder)


def check_control_folder(folder: Path) -> None:
    """Check the owner of a folder for control files, and make it private. A missing one is no error.

    Raises:
        PermissionError: it is no folder, or belongs to another user.
    """
    try:
        status = os.lstat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(errno.EPERM, "not a folder; remove it, and the tier creates the folder", str(folder))
    if status.st_uid == os.geteuid() and status.st_mode & _OTHERS:
        with suppress(OSError):  # the check decides
            folder.chmod(FOLDER_MODE)
    check_ownership(folder)


def is_own_file(path: Path, status: os.stat_result) -> bool:
    """Return whether a control file is a regular file of the user to whom its folder belongs."""
    owners = (os.geteuid(), path.parent.stat().st_uid)  # the folder was checked
    return stat.S_ISREG(status.st_mode) and status.st_uid in owners


def set_aside(path: Path, reason: object, log: TierLogger) -> None:
    """Rename a file that cannot be used. Only the latest one is kept.

    Raises:
        OSError: the folder cannot be written.
    """
    kept = path.with_name(path.name + DAMAGED_SUFFIX)
    with suppress(FileNotFoundError):
        try:
            kept.unlink()
        except IsADirectoryError:
            shutil.rmtree(kept)
    with suppress(FileNotFoundError):  # another process was faster
        path.rename(kept)
        log.warning("%s cannot be used (%s); it is now %s, and a new one takes its place", path, reason, kept.name)


def _try_to_open(path: Path, flags: int) -> int | None:
    """Return a descriptor, or ``None`` for a thing that is no file of this process's user."""
    flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # to open a FIFO never waits
    try:
        descriptor = os.open(path, flags, FILE_MODE)
    except OSError as error:
        if error.errno in _NOT_A_FILE_ERRNOS or (isinstance(error, PermissionError) and _is_foreign(path)):
            return None
        raise
    _open_descriptors.add(descriptor)
    try:
        status = os.fstat(descriptor)
        if is_own_file(path, status):
            if status.st_mode & _OTHERS:
                os.fchmod(descriptor, FILE_MODE)
            return descriptor
    except BaseException:
        close_control_file(descriptor)
        raise
    close_control_file(descriptor)
    return None


def _is_foreign(path: Path) -> bool:
    try:
        return not is_own_file(path, os.lstat(path))
    except OSError:
        return False


def _lock(descriptor: int, path: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    pause = _SHORTEST_PAUSE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise held_by_another(path, seconds) from None
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def held_by_another(path: Path, seconds: float) -> TimeoutError:
    """Return the error for a lock that another process holds for too long."""
    return TimeoutError(
        errno.ETIMEDOUT,
        f"another process has held its lock for {seconds:g} s; if it is stopped, continue or end it "
        "(fuser, with this path, names it)",
        str(path),
    )
