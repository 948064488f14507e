"""The processes that use a database, and the dead ones among them.

Each process locks a file of its own. The system drops the lock however the process ends. A process id would not do: it
is used again, and means nothing in another container that has the file mounted.
"""

from __future__ import annotations

import fcntl
import glob
import os
import secrets
from pathlib import Path

FILE_MODE = 0o600


class OwnProcess:
    """This process, alive for others from :meth:`register` to :meth:`unregister`, or to its end."""

    def __init__(self, database: Path) -> None:
        self._lock_file = database.with_name(f"{database.name}-owner-{secrets.token_hex(8)}")
        self._descriptor: int | None = None
        self.name = self._lock_file.name

    @property
    def is_registered(self) -> bool:
        """True between :meth:`register` and :meth:`unregister`."""
        return self._descriptor is not None

    def register(self) -> None:
        """Create and lock the file. The caller keeps others from calling :func:`remove_dead` meanwhile."""
        self._descriptor = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def unregister(self) -> None:
        """Remove the file. Idempotent."""
        if self._descriptor is not None:
            self._lock_file.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None


def remove_dead(database: Path, names: set[str]) -> list[str]:
    """Remove the lock files of dead processes; return the dead among ``names`` and all others with a lock file."""
    files = {file.name for file in database.parent.glob(f"{glob.escape(database.name)}-owner-*")}
    dead = [name for name in names | files if not _is_locked(database.with_name(name))]
    for name in dead:
        database.with_name(name).unlink(missing_ok=True)
    return dead


def _is_locked(file: Path) -> bool:
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
