"""Goes through a folder in small steps: removes what dead writers left, and brings the account in line.

One process does it at a time; the others go on with what the account says.
"""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from offload_backend_disk.capacity.account import Account
from offload_backend_disk.capacity.processes import Owners
from offload_backend_disk.folder.layout import Layout, hash_range

logger = logging.getLogger(__name__)

_FILES_AT_ONCE = 256


class Sweep:
    """What has to be gone through in one folder, and when.

    Args:
        layout: the folder.
        owners: its writers.
        account: its account, if it has a capacity.
    """

    def __init__(self, layout: Layout, owners: Owners, account: Account | None) -> None:
        self._layout = layout
        self._owners = owners
        self._account = account
        self._unreadable: set[Path] = set()
        self._has_unknown_debris = False

    def begin(self) -> bool:
        """Take this process's lock; returns whether there is anything to go through. What takes no time is done now.

        Without a lock, in a folder that cannot be written, nothing is.
        """
        try:
            new = self._owners.take()
            empty = self._layout.is_empty()
            self._has_unknown_debris = new and not empty  # from before there were locks
            if not self.is_needed():
                return False
            if not empty:
                return True
            for _ in self.steps():
                pass
            return self.is_needed()
        except OSError as error:
            logger.debug("%s: %s", self._layout.root, error)
            return False

    def is_needed(self) -> bool:
        """Return whether writers have died, or the account may be behind the disk. Blocks.

        Raises:
            OSError: the folder cannot be written.
        """
        if self._account is not None and self._account.needs_scan():
            return True
        return self._has_unknown_debris or bool(self._owners.dead())

    def steps(self) -> Generator[None, None, bool]:
        """Do it; every step blocks for some milliseconds, on any thread, one at a time.

        Folders that cannot be read are left out, and each is named once in the log.

        Returns:
            Whether all of it was done, or is being done by another process; else it is to be tried again.

        Raises:
            OSError: the folder itself cannot be read or written.
        """
        with self._alone() as alone:
            if not alone:
                return True
            dead = self._owners.dead()
            folders = self._layout.folders()
            yield
            complete = True
            for folder in folders:
                try:
                    yield from self._folder(folder)
                except OSError as error:
                    complete = False
                    if folder not in self._unreadable:
                        self._unreadable.add(folder)
                        logger.warning("%s cannot be scanned, and is tried again later: %s", folder, error)
                else:
                    self._unreadable.discard(folder)
            if complete:
                if self._account is not None:
                    self._account.scan_ends()
                self._owners.forget(dead)
                self._has_unknown_debris = False
            return complete

    def _folder(self, folder: Path) -> Iterator[None]:
        names, temporary = self._layout.names_in(folder)
        for name, owner in temporary:
            if not self._owners.alive(owner):
                (folder / name).unlink(missing_ok=True)
        if self._account is None:
            yield
            return
        after, last = hash_range(folder.name)
        for start in range(0, max(len(names), 1), _FILES_AT_ONCE):
            part = names[start : start + _FILES_AT_ONCE]
            ends = start + _FILES_AT_ONCE >= len(names)
            up_to = last if ends else self._layout.key(folder, part[-1]).chunk_hash
            self._account.scan(folder, part, after, up_to)
            after = up_to
            yield

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        with (self._owners.folder / "scanning").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True
