"""Which processes write into a folder, and which of them are dead.

A process is alive while it holds a lock on a file of its own, which the kernel lets go of whichever way the process
ends. Everything here blocks, on any thread.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER_NAME = ".offload-core"
_OWNERS = "owners"


class Owners:
    """The writers of one folder, as one of them sees them.

    Args:
        root: the folder; the lock files lie in a folder of their own in it.
        owner: names this writer and its temporary files; nobody else uses the name.
    """

    def __init__(self, root: Path, owner: str) -> None:
        self.owner = owner
        self.folder = root / FOLDER_NAME
        self._descriptor = -1
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Take this writer's lock, again where somebody has removed its file. Cheap while it is there.

        Returns:
            Whether this folder had no lock files before: what lies there may be older than they are.

        Raises:
            OSError: the folder cannot be written.
        """
        with self._lock:
            if self._is_held():
                return False
            self._let_go()
            new = not (self.folder / _OWNERS).is_dir()
            (self.folder / _OWNERS).mkdir(mode=0o700, parents=True, exist_ok=True)
            with self.opening():
                # Not to write: a file system with files that are open for that cannot be remounted read-only.
                descriptor = os.open(self.file, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                self._descriptor = descriptor
            return new

    def drop(self) -> None:
        """Let go of this writer's lock and remove its file, where that can be. Idempotent."""
        with self._lock:
            if self._is_held():
                with suppress(OSError):
                    self.file.unlink(missing_ok=True)
            self._let_go()

    @contextmanager
    def opening(self) -> Iterator[None]:
        """One process at a time: a new lock file exists for a moment before it is locked, and is not to seem dead."""
        with (self.folder / "opening").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def alive(self, owner: str) -> bool:
        """Return whether a writer lives. One without a lock file does not."""
        try:
            descriptor = os.open(self._file(owner), os.O_RDONLY | os.O_CLOEXEC)
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
        """Return the writers that ended without letting go of their files: they were killed.

        Raises:
            OSError: the folder cannot be written.
        """
        with self.opening():
            names = [path.name for path in (self.folder / _OWNERS).iterdir()]
            return [name for name in names if name != self.owner and not self.alive(name)]

    def forget(self, owners: Iterable[str]) -> None:
        """Remove the files of dead writers, of which nothing is left."""
        for owner in owners:
            self._file(owner).unlink(missing_ok=True)

    @property
    def file(self) -> Path:
        """The file by which this writer is known; no other process ever makes one of that name."""
        return self._file(self.owner)

    def _file(self, owner: str) -> Path:
        return self.folder / _OWNERS / owner

    def _is_held(self) -> bool:
        if self._descriptor < 0:
            return False
        try:
            locked = os.fstat(self._descriptor)
        except OSError:  # the mount that it was opened on is gone, whatever is in its place
            return False
        try:
            return os.path.samestat(self.file.stat(), locked)
        except FileNotFoundError:
            return False

    def _let_go(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with suppress(OSError):  # on a mount that is gone even that is an error
                os.close(descriptor)
