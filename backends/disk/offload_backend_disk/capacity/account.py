"""The account of a folder: its objects, their last uses, and the reservations of all processes.

One SQLite database in the folder serves all processes on the host. Every byte is reserved in it before the write, so
the account never counts less than the disk holds. If a process is killed, the surviving ones release its reservations.
Files are removed inside a transaction, so a file seen there exists until the transaction ends. The one exception: if
another process holds the database for long, :meth:`Account.remove` does not wait for it. Its change is written later.

Everything here blocks; calls may come from any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from offload_backend_disk.capacity.database import Database
from offload_backend_disk.capacity.eviction import Evictor, Limits
from offload_backend_disk.capacity.pins import Pins
from offload_backend_disk.capacity.rows import PackNumbers, Rows, Segment
from offload_backend_disk.capacity.write_behind import CLOCK_TOLERANCE_NS, Recency, WriteBehind
from offload_backend_disk.folder.control_files import LOCK_SECONDS, held_by_another
from offload_backend_disk.folder.files import DISK_FULL_ERRNOS
from offload_backend_disk.folder.layout import Layout, hash_range
from offload_backend_disk.folder.mount_guard import MountGuard
from offload_backend_disk.folder.processes import Processes
from offload_core.api import ObjectKey, TierLogger

_TURN_STEP_SECONDS = 0.05
_REMOVE_WAIT_SECONDS = 0.1
"""A load waits for the removal of a damaged object."""


class Account:
    """The account of one folder, as one process sees it.

    Args:
        mount_guard: the folder.
        processes: the processes that use it; reservations are made in this one's name.
        limits: the limits of the folder.
    """

    def __init__(self, mount_guard: MountGuard, processes: Processes, limits: Limits, log: TierLogger) -> None:
        self._mount_guard = mount_guard
        self._layout = Layout(mount_guard.root)
        self._processes = processes
        self._log = log
        self._database = Database(processes.state_folder / "account.sqlite", log)
        self._pins = Pins(processes.state_folder / "pins", log)
        self._write_behind = WriteBehind()
        next_time_ns = self._write_behind.next_time_ns
        self._evictor = Evictor(self._layout, self._pins, limits, mount_guard.free_bytes, next_time_ns, log)
        self._lock = threading.Lock()  # around everything that uses the database
        self._pack_numbers = PackNumbers()
        self._is_open = False
        self._reopened = False
        self._is_scanned = False
        self._has_logged_that_it_is_held = False

    def open(self, wait_seconds: float = LOCK_SECONDS) -> None:
        """Open or create the account, and register this process.

        Args:
            wait_seconds: the longest wait for each lock that another process holds.

        Raises:
            TimeoutError: another process holds it.
            OSError: the folder cannot be written, is full, or is on another file system than before.
        """
        with self._turn(wait_seconds):
            self._is_open = True
            self._open(wait_seconds)

    def close(self) -> None:
        """Flush the pending changes, then close all files and remove this process's lock. Idempotent."""
        if self._database.is_in_place:  # a removed one has no reader left
            self.flush()
        with self._lock:
            self._is_open = False
            self._database.close()
            self._pins.close()
        self._processes.unregister()

    def reserve(
        self, wanted: Sequence[tuple[ObjectKey, int]], spare: Sequence[bool] = ()
    ) -> tuple[list[int | None], list[ObjectKey]]:
        """Reserve capacity for objects, in order; other objects are evicted for it, but for spare objects none.

        Args:
            wanted: key and bytes of each object.
            spare: one flag per object, or nothing, which stands for no spare object.

        Returns:
            A reservation per object, ``None`` if it does not fit; and the evicted keys.

        Raises:
            OSError: the account cannot be used. A full disk is no error, nor is another process that has held the
                account for ``LOCK_SECONDS``: nothing fits then.
        """
        evicted: list[ObjectKey] = []
        granted: list[int | None] = []
        spare = spare or [False] * len(wanted)
        kept_sizes = [nbytes for (_, nbytes), is_spare in zip(wanted, spare, strict=True) if not is_spare]
        if not self._is_scanned and self._lock.locked():  # a store never waits for a scan
            return [None] * len(wanted), evicted
        try:
            with self._transaction() as rows:
                if kept_sizes and self._evictor.evict_excess(rows, min(kept_sizes)):
                    evicted += rows.removed_files
                    return [None] * len(wanted), evicted
                for (key, nbytes), is_spare in zip(wanted, spare, strict=True):
                    if is_spare:
                        fits = self._evictor.fits_freely(rows, nbytes)
                    else:
                        fits = self._evictor.evict_for(rows, nbytes)
                        if not fits and self._release_dead_reservations(rows):
                            fits = self._evictor.evict_for(rows, nbytes)
                    own_name, segment = self._processes.own_name, segment_of(is_spare)
                    granted.append(rows.add_reservation(own_name, key, nbytes, segment) if fits else None)
                    evicted += rows.removed_files
                    rows.removed_files.clear()
                self._is_scanned = self._is_scanned or rows.totals().scanned
        except OSError as error:
            self._write_behind.record_removed(evicted)
            if isinstance(error, TimeoutError):
                self._log_once_that_it_is_held(error)
            elif error.errno not in DISK_FULL_ERRNOS:
                raise
            return [None] * len(wanted), evicted
        return granted, evicted

    def release(self, reservations: Iterable[int], stored: Iterable[tuple[ObjectKey, Segment]] = ()) -> None:
        """Release reservations, and add the objects that are on the disk now, each to its segment.

        If the database cannot be written because the disk is full, the next transaction does it.
        """
        self._write_behind.record_stored(stored, reservations)
        self.flush()

    def flush(self) -> None:
        """Write the pending changes to the database. If that fails, they stay pending."""
        if self._write_behind:
            with suppress(OSError), self._transaction():
                pass

    def remove(self, keys: Iterable[ObjectKey]) -> None:
        """Remove objects from the disk and from the account.

        If another process holds the account, the next transaction removes them from it.

        Raises:
            OSError: the folder cannot be written.
        """
        keys = list(keys)
        removed = 0
        try:
            with self._transaction(_REMOVE_WAIT_SECONDS) as rows:
                for key in keys:
                    self._layout.unlink(key)
                    rows.removed_files.append(key)
                    removed += 1
                rows.remove_objects(rows.removed_files)
        except TimeoutError:
            self.remove_at_once(keys)
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS or not removed:
                raise

    def remove_at_once(self, keys: Iterable[ObjectKey]) -> None:
        """Remove objects from the disk. The next transaction removes them from the account."""
        for key in keys:
            self._layout.unlink(key)
            self._write_behind.record_removed([key])

    def record_use(self, keys: Iterable[ObjectKey]) -> None:
        """Record a use of objects. The next transaction writes it to the database."""
        self._write_behind.record_use(keys)

    def touch(self, keys: Sequence[ObjectKey], spare: Sequence[bool]) -> None:
        """Make objects the most recently used ones, in this order; the next transaction writes it to the database.

        An object that this process has pinned is in use. It does not become spare.
        """
        touched = zip(keys, spare, strict=True)
        self._write_behind.record(
            (key, Recency.MADE_SPARE if is_spare else Recency.TOUCHED)
            for key, is_spare in touched
            if not (is_spare and self._pins.is_pinned_here(key))
        )

    def pin(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Pin the objects that are present: no process evicts one until :meth:`unpin` was called as often.

        Returns:
            The size of each object, ``None`` if it is absent.
        """
        sizes = self._pins.pin(keys, self._layout.nbytes)
        self.record_use(key for key, size in zip(keys, sizes, strict=True) if size is not None)
        return sizes

    def unpin(self, keys: Iterable[ObjectKey]) -> None:
        """Undo :meth:`pin` for the keys that it found present."""
        self._pins.unpin(keys)

    @property
    def used_bytes(self) -> int:
        """Bytes of all objects and reservations in the folder."""
        with self._transaction() as rows:
            return rows.totals().used

    @property
    def needs_flush(self) -> bool:
        """True if changes are pending for :meth:`flush`."""
        return bool(self._write_behind)

    def take_reopened_flag(self) -> bool:
        """Return whether the account was reopened since the last call, because its folder had gone."""
        reopened, self._reopened = self._reopened, False
        return reopened

    def release_dead_reservations(self) -> None:
        """Release the reservations of ended processes, and remove their unfinished files.

        Times of use in the future, from before a clock was set back, are corrected on the way.
        """
        with self._transaction() as rows:
            self._release_dead_reservations(rows)
            rows.correct_future_uses(time.time_ns(), CLOCK_TOLERANCE_NS)

    def needs_scan(self) -> bool:
        """Return whether the account may differ from the disk: it is new, or the machine was restarted.

        A new account counts as full until a scan has added the objects of the folder.
        """
        with self._transaction() as rows:
            totals = rows.totals()
        self._is_scanned = totals.scanned
        return not totals.scanned or totals.boot != _boot_id()

    def scan(self, folder: Path, names: Sequence[str], after: bytes, up_to: bytes) -> None:
        """Correct the account for a part of one folder of the layout.

        Args:
            names: the folder's objects with hashes above ``after`` and at most ``up_to``.
        """
        namespace, pack = folder.parts[-3:-1]
        listed = [self._layout.key(folder, name) for name in names]
        with self._transaction() as rows:  # nothing is removed meanwhile: a file seen here exists until its end
            counted = rows.objects_between(namespace, pack, after, up_to)
            present = {key: found for key in listed if (found := self._size_and_time(key))}
            changed = ((key, found) for key, found in present.items() if counted.get(key.chunk_hash) != found[0])
            rows.put_objects((key, nbytes, stored_ns, Segment.UNPROTECTED) for key, (nbytes, stored_ns) in changed)
            present_hashes = {key.chunk_hash for key in present}
            missing = [ObjectKey(namespace, pack, one) for one in counted if one not in present_hashes]
            rows.remove_objects(key for key in missing if self._size_and_time(key) is None)

    def finish_scan(self) -> None:
        """Record that every folder was scanned; objects of folders that are gone are removed from the account."""
        with self._transaction() as rows:
            for namespace, pack, prefix in rows.folders():
                if self._layout.is_gone(self._layout.root / namespace / pack / prefix):
                    gone = rows.objects_between(namespace, pack, *hash_range(prefix))
                    rows.remove_objects(ObjectKey(namespace, pack, one) for one in gone)
            rows.correct_future_uses(time.time_ns(), CLOCK_TOLERANCE_NS)
            rows.set_scanned(_boot_id())
        self._is_scanned = True

    def _size_and_time(self, key: ObjectKey) -> tuple[int, int] | None:
        """Return an object's size in bytes and the time of its store in nanoseconds."""
        status = self._layout.status(key)
        return None if status is None else (status.st_size, status.st_mtime_ns)

    def _release_dead_reservations(self, rows: Rows) -> bool:
        """Return whether a dead process had reservations. Its objects that reached the disk are added."""
        own_name = self._processes.own_name
        alive = {name: self._processes.is_alive(name) for name in rows.reserving_processes() if name != own_name}
        left = [one for one in rows.reservations_of_others(own_name) if not alive[one.process]]
        for one in left:
            self._layout.remove_temporaries(one.key, one.process)
        self._put_present(rows, ((one.key, self._write_behind.next_time_ns(), one.segment) for one in left))
        rows.remove_reservations(one.number for one in left)
        return bool(left)

    def _put_present(self, rows: Rows, objects: Iterable[tuple[ObjectKey, int, Segment]]) -> None:
        """Add those of the objects that are on the disk, with the time of their last use and their segment."""
        sizes = ((key, self._layout.nbytes(key), used_ns, segment) for key, used_ns, segment in objects)
        rows.put_objects(
            (key, nbytes, used_ns, segment) for key, nbytes, used_ns, segment in sizes if nbytes is not None
        )

    @contextmanager
    def _transaction(self, wait_seconds: float = LOCK_SECONDS) -> Iterator[Rows]:
        """Run one transaction, all or nothing. It begins with the pending changes.

        Args:
            wait_seconds: the longest wait for other threads and processes.

        Raises:
            TimeoutError: another thread or process has held the account for so long.
            OSError: the account cannot be used.
        """
        with self._turn(wait_seconds) as seconds_left:
            if not self._is_open:
                raise OSError(f"{self._database.path}: the account is not open")
            if not self._database.is_in_place:  # the folder was removed or unmounted
                self._open(seconds_left)
                self._reopened = True
            pending = self._write_behind.take()
            removed_files: list[ObjectKey] = []
            try:
                with self._database.transaction(seconds_left) as sql:
                    self._has_logged_that_it_is_held = False
                    rows = Rows(sql, self._pack_numbers)
                    removed_files = rows.removed_files
                    rows.remove_reservations(pending.reservations)
                    rows.remove_objects(key for key in pending.removed if self._layout.nbytes(key) is None)
                    self._put_present(rows, ((key, *stored) for key, stored in pending.stored.items()))
                    self._evictor.record(rows, pending.recency)
                    yield rows
            except BaseException:
                self._pack_numbers.clear()
                self._write_behind.put_back(pending)
                self._write_behind.record_removed(removed_files)
                raise

    @contextmanager
    def _turn(self, wait_seconds: float) -> Iterator[float]:
        """Wait for the turn of this thread. Yields the seconds that are left.

        At most one thread waits for another process, so that the others remain for loads.

        Raises:
            TimeoutError: it did not come.
        """
        deadline = time.monotonic() + wait_seconds
        while not self._lock.acquire(timeout=min(_TURN_STEP_SECONDS, wait_seconds)):
            if self._database.is_held or time.monotonic() > deadline:
                raise held_by_another(self._database.path, wait_seconds)
        try:
            yield max(0.0, deadline - time.monotonic())
        finally:
            self._lock.release()

    def _log_once_that_it_is_held(self, error: TimeoutError) -> None:
        if not self._has_logged_that_it_is_held:
            self._has_logged_that_it_is_held = True
            self._log.warning(
                "%s: stores are rejected until the account is free again, and loads continue: %s",
                self._layout.root,
                error,
            )

    def _open(self, wait_seconds: float) -> None:
        self._database.close()
        self._pack_numbers.clear()
        self._mount_guard.open()
        self._processes.register()
        self._pins.open()  # first: an open database stands for an account that is open as a whole
        with self._processes.startup_lock(wait_seconds):
            self._database.open(wait_seconds)


def segment_of(is_spare: bool) -> Segment:
    """Return the segment of a new object."""
    return Segment.SPARE if is_spare else Segment.UNPROTECTED


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
