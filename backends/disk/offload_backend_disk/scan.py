"""The scan of a folder, in small steps: it removes the files of dead processes and corrects the account.

One process scans at a time; the others use the account as it is.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
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
        self._logged: set[Path] = set()
        self._failed: set[Path] = set()
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
        return bool(self._failed) or self._is_older_than_lock_files or bool(self._processes.dead())

    def steps(self) -> Generator[None, None, bool]:
        """Scan; each step blocks for some milliseconds, on any thread, one at a time.

        A sub-folder that cannot be read is skipped, and logged once. If this process may not read it, it counts as
        empty: this process can neither load nor evict anything there. If the disk fails at it twice, the account goes
        on without it.

        Returns:
            True if every folder was scanned, or another process scans now; false if the scan must be retried.

        Raises:
            OSError: the folder itself cannot be read or written.
        """
        with self._only_scan() as is_only:
            if not is_only:
                return True
            dead, uncounted = self._processes.dead(), self._processes.uncounted()
            failed: set[Path] = set()

            def skip(folder: Path, error: OSError) -> None:
                if isinstance(error, PermissionError):
                    self._log_once(folder, "may not be read by this process, and counts as empty", error)
                else:
                    failed.add(folder)
                    self._log_once(folder, "cannot be scanned, and is retried later", error)

            folders = self._layout.folders(skip)
            yield
            complete = True
            for folder in folders:
                try:
                    names, temporaries = self._layout.names_in(folder)
                except OSError as error:
                    skip(folder, error)
                    continue
                try:
                    yield from self._scan_names(folder, names, temporaries)
                except OSError as error:
                    complete = False
                    self._log_once(folder, "cannot be scanned, and is retried later", error)
                else:
                    self._logged.discard(folder)
            fails_again, self._failed = failed <= self._failed and len(failed) < len(folders), failed
            if complete and self._account is not None and (fails_again or not failed):
                self._account.finish_scan()
            if complete and failed and fails_again:
                self._log_once(self._layout.root, "its capacity leaves out the folders that cannot be scanned")
            if complete and not failed:
                self._logged.discard(self._layout.root)
                if self._account is not None:
                    self._processes.forget_uncounted(uncounted)
                self._processes.remove_lock_files(dead)
                self._is_older_than_lock_files = False
            return complete and not failed

    def _log_once(self, folder: Path, what: str, error: OSError | None = None) -> None:
        if folder not in self._logged:
            self._logged.add(folder)
            if error is None:
                self._log.warning("%s: %s", folder, what)
            else:
                self._log.warning("%s %s: %s", folder, what, error)

    def _scan_names(self, folder: Path, names: list[str], temporaries: list[tuple[str, str]]) -> Iterator[None]:
        for name, process in temporaries:
            if not self._processes.is_alive(process):
                with suppress(PermissionError):  # another user's folder
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
