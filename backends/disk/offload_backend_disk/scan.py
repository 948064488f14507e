"""The scan of a folder, in small steps: it removes the files of dead processes and corrects the account.

One process scans at a time; the others use the account as it is.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from offload_backend_disk.capacity.account import Account
from offload_backend_disk.folder.control_files import locked
from offload_backend_disk.folder.layout import Layout, hash_range
from offload_backend_disk.folder.processes import Processes
from offload_core.api import TierLogger

_FILES_PER_STEP = 256


class Scan:
    """The scan of one folder.

    Args:
        layout: the folder.
        processes: the processes that write to it.
        account: its account, if the tier has a capacity.
    """

    def __init__(self, layout: Layout, processes: Processes, account: Account | None, log: TierLogger) -> None:
        self._layout = layout
        self._processes = processes
        self._account = account
        self._log = log
        self._unreadable: set[Path] = set()
        self._is_older_than_lock_files = False

    def start(self) -> bool:
        """Register this process, and scan an empty folder at once; return whether a scan remains to be done.

        A folder that cannot be written cannot be locked either, and is never scanned.
        """
        try:
            is_first = self._processes.register()
            is_empty = self._layout.is_empty()
            self._is_older_than_lock_files = is_first and not is_empty
            if not self.is_needed():
                return False
            if not is_empty:
                return True
            for _ in self.steps():
                pass
            return self.is_needed()
        except OSError as error:
            self._log.debug("%s: %s", self._layout.root, error)
            return False

    def is_needed(self) -> bool:
        """Return whether processes have died, or the account may differ from the disk. Blocks.

        Raises:
            OSError: the folder cannot be written.
        """
        if self._account is not None and (self._account.needs_scan() or self._processes.uncounted()):
            return True
        return self._is_older_than_lock_files or bool(self._processes.dead())

    def steps(self) -> Generator[None, None, bool]:
        """Scan; each step blocks for some milliseconds, on any thread, one at a time.

        A folder that cannot be read is skipped, and logged once.

        Returns:
            True if every folder was scanned, or another process scans now; false if the scan must be retried.

        Raises:
            OSError: the folder itself cannot be read or written.
        """
        with self._only_scan() as is_only:
            if not is_only:
                return True
            dead, uncounted = self._processes.dead(), self._processes.uncounted()
            folders = self._layout.folders()
            yield
            complete = True
            for folder in folders:
                try:
                    yield from self._scan_folder(folder)
                except OSError as error:
                    complete = False
                    if folder not in self._unreadable:
                        self._unreadable.add(folder)
                        self._log.warning("%s cannot be scanned, and is retried later: %s", folder, error)
                else:
                    self._unreadable.discard(folder)
            if complete:
                if self._account is not None:
                    self._account.finish_scan()
                    self._processes.forget_uncounted(uncounted)
                self._processes.remove_lock_files(dead)
                self._is_older_than_lock_files = False
            return complete

    def _scan_folder(self, folder: Path) -> Iterator[None]:
        names, temporaries = self._layout.names_in(folder)
        for name, process in temporaries:
            if not self._processes.is_alive(process):
                (folder / name).unlink(missing_ok=True)
        if self._account is None:
            yield
            return
        after, last = hash_range(folder.name)
        for start in range(0, max(len(names), 1), _FILES_PER_STEP):
            part = names[start : start + _FILES_PER_STEP]
            is_last = start + _FILES_PER_STEP >= len(names)
            up_to = last if is_last else self._layout.key(folder, part[-1]).chunk_hash
            self._account.scan(folder, part, after, up_to)
            after = up_to
            yield

    @contextmanager
    def _only_scan(self) -> Iterator[bool]:
        """Keep other processes from scanning meanwhile. Yields ``False`` if one scans already."""
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self._processes.state_folder / "scanning", 0, self._log))
            except TimeoutError:
                yield False
                return
            yield True
