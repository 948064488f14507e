"""The processes that write to a folder, and the dead ones among them.

A process is alive while it holds the lock on a file of its own. The kernel releases the lock however the process ends.
Two backends of one process count as two. Everything here blocks, on any thread.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

STATE_FOLDER = ".offload-core"
"""Name of the sub-folder with the lock files and the account."""

_LOCK_FILES = "owners"


class Processes:
    """The processes that write to one folder, as one of them sees them.

    Args:
        root: the folder; the lock files are in a sub-folder of their own.
        own_name: the unique name of this process; its temporary files have it too.

    Attributes:
        own_name: the same.
        state_folder: the sub-folder with the lock files and the account.
    """

    def __init__(self, root: Path, own_name: str) -> None:
        self.own_name = own_name
        self.state_folder = root / STATE_FOLDER
        self._descriptor = -1
        self._lock = threading.Lock()

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
            lock_files = self.state_folder / _LOCK_FILES
            is_first = not lock_files.is_dir()
            lock_files.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self.startup_lock():
                # Read-only: a file system cannot be remounted read-only while a file on it is open for writing.
                descriptor = os.open(self.own_lock_file, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                self._descriptor = descriptor
            return is_first

    def unregister(self) -> None:
        """Release this process's lock and remove its file, if that is possible. Idempotent."""
        with self._lock:
            if self._is_registered():
                with suppress(OSError):
                    self.own_lock_file.unlink(missing_ok=True)
            self._close()

    @contextmanager
    def startup_lock(self) -> Iterator[None]:
        """Keep other processes from starting or looking for dead ones meanwhile.

        A new lock file exists for a moment before it is locked, and must not seem to be a dead process's.
        """
        with (self.state_folder / "opening").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def is_alive(self, name: str) -> bool:
        """Return whether a process is alive. Without a lock file it is not."""
        try:
            descriptor = os.open(self._lock_file(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def dead(self) -> list[str]:
        """Return the processes that ended without removing their lock files: they were killed.

        Raises:
            OSError: the folder cannot be written.
        """
        with self.startup_lock():
            names = [path.name for path in (self.state_folder / _LOCK_FILES).iterdir()]
            return [name for name in names if name != self.own_name and not self.is_alive(name)]

    def remove_lock_files(self, names: Iterable[str]) -> None:
        """Remove the lock files of dead processes, after everything else of theirs was removed."""
        for name in names:
            self._lock_file(name).unlink(missing_ok=True)

    @property
    def own_lock_file(self) -> Path:
        """The lock file of this process; no other process ever creates a file of this name."""
        return self._lock_file(self.own_name)

    def _lock_file(self, name: str) -> Path:
        return self.state_folder / _LOCK_FILES / name

    def _is_registered(self) -> bool:
        if self._descriptor < 0:
            return False
        try:
            locked = os.fstat(self._descriptor)
        except OSError:  # its mount is gone
            return False
        try:
            return os.path.samestat(self.own_lock_file.stat(), locked)
        except FileNotFoundError:
            return False

    def _close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with suppress(OSError):  # after an unmount even a close may fail
                os.close(descriptor)
