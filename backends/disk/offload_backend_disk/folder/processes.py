"""The processes that write to a folder, and the dead ones among them.

A process is alive while it holds the lock on a file of its own. The kernel releases the lock however the process ends.
An unmount releases it too: the first process that is back takes the others for dead, until they lock their files again.
So the folder also has a mark, a file with a random name that nobody removes. By it, a process knows the folder again.
Two backends of one process count as two.

A process without a capacity leaves a file too, before its first store. It tells the others that the account lacks the
objects of that process. A scan after the end of the process removes the file.

Everything here blocks, on any thread.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from offload_backend_disk.folder.control_files import (
    check_control_folder,
    close_control_file,
    locked,
    make_control_folder,
    open_control_file,
)
from offload_core.api import TierLogger

STATE_FOLDER = ".offload-core"
"""Name of the sub-folder with the lock files and the account."""

_LOCK_FILES = "owners"
_PROCESS = re.compile(r"[0-9a-z]{1,64}")
_UNFINISHED = "starting-"
_MARK = re.compile(r"folder-[0-9a-f]{32}")
_UNCOUNTED = "uncounted-"


class Processes:
    """The processes that write to one folder, as one of them sees them.

    Args:
        root: the folder; the lock files are in a sub-folder of their own.
        own_name: the unique name of this process; its temporary files have it too.

    Attributes:
        own_name: the same.
        state_folder: the sub-folder with the lock files and the account.
    """

    def __init__(self, root: Path, own_name: str, log: TierLogger) -> None:
        self.own_name = own_name
        self._log = log
        self.state_folder = root / STATE_FOLDER
        self._lock_files = self.state_folder / _LOCK_FILES
        self._descriptor = -1
        self._mark: Path | None = None
        self._lock = threading.Lock()

    def check_folders(self) -> None:
        """Check the folders of the lock files and the account, as far as they exist, and make them private.

        Raises:
            PermissionError: one of them is no folder, or belongs to another user.
        """
        check_control_folder(self.state_folder)
        check_control_folder(self._lock_files)

    def register(self) -> bool:
        """Lock this process's file, and lock it again if the file was removed. Cheap if it is locked.

        Returns:
            True if the folder had no lock files before; its other files may then be older.

        Raises:
            OSError: the folder cannot be written.
        """
        with self._lock:
            if self._is_registered():
                return False
            self._close()
            is_first = not self._lock_files.is_dir()
            make_control_folder(self.state_folder)
            make_control_folder(self._lock_files)
            self._descriptor = self._create_lock_file()
            self._remove_unfinished()
            if self._mark is None or not self._mark.exists():
                with suppress(OSError):  # without a mark, the folder is not known again after a remount
                    self._mark = self._find_mark()
            return is_first

    def recognise_folder(self) -> bool:
        """Return whether the folder is the one in which this process was registered, even if it is mounted anew.

        Raises:
            OSError: the folder cannot be read.
        """
        return self._mark is not None and self._mark.exists()

    def unregister(self) -> None:
        """Release this process's lock and remove its file, if that is possible. Idempotent."""
        with self._lock:
            if self._is_registered():
                with suppress(OSError):
                    self.own_lock_file.unlink(missing_ok=True)
            self._close()

    def startup_lock(self, wait_seconds: float) -> AbstractContextManager[None]:
        """Keep other processes from opening the account meanwhile.

        Raises:
            TimeoutError: another process has held the lock for so long.
            OSError: the folder cannot be written.
        """
        return locked(self.state_folder / "opening", wait_seconds, self._log)

    def is_alive(self, name: str) -> bool:
        """Return whether a process is alive. Without a lock file it is not."""
        return _is_locked(self._lock_file(name))

    def dead(self) -> list[str]:
        """Return the processes that ended without removing their lock files: they were killed.

        Raises:
            OSError: the folder cannot be read.
        """
        found: list[str] = []
        with os.scandir(self._lock_files) as entries:
            for entry in entries:
                is_one = _PROCESS.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
                if is_one and entry.name != self.own_name and not self.is_alive(entry.name):
                    found.append(entry.name)
        return found

    def remove_lock_files(self, names: Iterable[str]) -> None:
        """Remove the lock files of dead processes, after everything else of theirs was removed."""
        for name in names:
            self._lock_file(name).unlink(missing_ok=True)

    def announce_uncounted(self) -> None:
        """Leave a file that says that this process stores objects without the account. Cheap if it is there.

        This process's file stands for those of dead processes too, so that they never become many.

        Raises:
            OSError: the folder cannot be written.
        """
        path = self.state_folder / f"{_UNCOUNTED}{self.own_name}"
        if not path.exists():
            close_control_file(open_control_file(path, self._log))
            self.forget_uncounted(self.uncounted())

    def uncounted(self) -> list[str]:
        """Return the ended processes whose objects the account may lack.

        Raises:
            OSError: the folder cannot be read.
        """
        paths = self.state_folder.glob(f"{_UNCOUNTED}*")
        names = [path.name.removeprefix(_UNCOUNTED) for path in paths if _is_file(path)]
        return [name for name in names if _PROCESS.fullmatch(name) and not self.is_alive(name)]

    def forget_uncounted(self, names: Iterable[str]) -> None:
        """Remove the files of ended processes, after the account has their objects."""
        for name in names:
            (self.state_folder / f"{_UNCOUNTED}{name}").unlink(missing_ok=True)

    @property
    def own_lock_file(self) -> Path:
        """The lock file of this process; no other process ever creates a file of this name."""
        return self._lock_file(self.own_name)

    def _create_lock_file(self) -> int:
        """Create this process's lock file and return its descriptor.

        The file gets its name when it is locked. Before that it would seem to be a dead process's.
        """
        while True:
            unfinished = self.state_folder / f"{_UNFINISHED}{secrets.token_hex(8)}"
            # Read-only: a file system cannot be remounted read-only while a file on it is open for writing.
            descriptor = open_control_file(unfinished, self._log, os.O_RDONLY | os.O_EXCL)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                unfinished.rename(self.own_lock_file)
                return descriptor
            except (BlockingIOError, FileNotFoundError):  # another process takes it for a dead one's
                close_control_file(descriptor)
                if not self._lock_files.is_dir():
                    raise
            except BaseException:
                close_control_file(descriptor)
                unfinished.unlink(missing_ok=True)
                raise

    def _find_mark(self) -> Path:
        """Return a mark of the folder; make one if there is none. Two processes may make one each, which is right."""
        found = (path for path in self.state_folder.iterdir() if _MARK.fullmatch(path.name))
        mark = next(found, self.state_folder / f"folder-{secrets.token_hex(16)}")
        close_control_file(open_control_file(mark, self._log))
        return mark

    def _remove_unfinished(self) -> None:
        """Remove lock files of processes that were killed before the file had its name."""
        for unfinished in self.state_folder.glob(f"{_UNFINISHED}*"):
            with suppress(OSError):
                if not _is_locked(unfinished):
                    unfinished.unlink()

    def _lock_file(self, name: str) -> Path:
        return self._lock_files / name

    def _is_registered(self) -> bool:
        if self._descriptor < 0:
            return False
        try:
            locked_file = os.fstat(self._descriptor)
        except OSError:  # its mount is gone
            return False
        try:
            return os.path.samestat(os.lstat(self.own_lock_file), locked_file)
        except FileNotFoundError:
            return False

    def _close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            close_control_file(descriptor)


def _is_locked(path: Path) -> bool:
    """Return whether a process holds the lock on a file. Anything but a file is not locked."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if isinstance(error, FileNotFoundError) or not _is_file(path):
            return False
        raise
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False
