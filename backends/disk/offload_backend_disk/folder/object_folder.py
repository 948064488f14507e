"""A folder of objects. Everything here blocks, on any thread."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from offload_backend_disk.folder import files
from offload_backend_disk.folder.direct_io import is_aligned
from offload_backend_disk.folder.layout import Layout
from offload_backend_disk.folder.mount_guard import MountGuard
from offload_backend_disk.folder.processes import Processes
from offload_core.api import LoadCheck, LoadOutcome, ObjectKey, StoredObject, StoreOutcome, StoreSeal, TierLogger

_BAD_FILE_ERRNOS = (errno.EIO, errno.EUCLEAN)
"""Errors of a read that may concern one file only: a bad sector, or a damaged entry of the file system."""
_MAX_BAD_FILES = 1000


class ObjectFolder:
    """Objects in a folder, one file each.

    Args:
        mount_guard: the folder.
        processes: the processes that write to it; this one's lock protects its unfinished files.
        fsync: the data forced to the disk before an object counts as stored.
        keep_free_bytes: the bytes that :meth:`check_free_space` leaves on the file system.
        is_counted: an account counts the objects.

    Attributes:
        direct: whole pages are read and written past the page cache; set it before the first call.
    """

    def __init__(
        self,
        mount_guard: MountGuard,
        processes: Processes,
        fsync: files.Fsync,
        log: TierLogger,
        keep_free_bytes: int = 0,
        *,
        is_counted: bool = False,
    ) -> None:
        self.layout = Layout(mount_guard.root)
        self._mount_guard = mount_guard
        self._processes = processes
        self._fsync = fsync
        self._log = log
        self._keep_free_bytes = keep_free_bytes
        self._is_counted = is_counted
        self._is_full = False
        self._bad_files: set[ObjectKey] = set()
        self._has_warned_of_odd_path = False
        self.direct = False

    def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return, per key, whether its file exists."""
        return [size is not None for size in self.sizes(keys)]

    def has(self, key: ObjectKey) -> bool:
        """Return whether the object's file exists. A store finds out by itself if the whole folder is gone."""
        return self.layout.nbytes(key) is not None

    def sizes(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Return, per key, the bytes of its file, or ``None`` if it is missing."""
        sizes = [self.layout.nbytes(key) for key in keys]
        if None in sizes:
            self._mount_guard.check()
        return sizes

    def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        """Read objects, in order; see :meth:`load_each` for errors of the disk.

        Anything but a file that this process may read is a miss.
        """
        items = zip(keys, buffers, strict=True)
        return self._checked(self.load_each(keys, [partial(self.load_one, *item) for item in items]))

    def load_and_check(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], checks: Sequence[LoadCheck]
    ) -> list[LoadOutcome]:
        """Read objects as :meth:`load` does, and check them on the way; see :meth:`load_one`."""
        items = zip(keys, buffers, checks, strict=True)
        return self._checked(self.load_each(keys, [partial(self.load_one, *item) for item in items]))

    def load_each(self, keys: Sequence[ObjectKey], loads: Sequence[Callable[[], LoadOutcome]]) -> list[LoadOutcome]:
        """Load the objects of one batch, in order.

        If the disk cannot read one file, but can read another one of the batch, the object is corrupt. It stays so when
        it is read again alone. Otherwise the disk has failed.

        Args:
            loads: one function per key.

        Raises:
            OSError: the disk has failed. The second error ends the batch.
        """
        outcomes: list[LoadOutcome] = []
        bad_file: tuple[ObjectKey, OSError] | None = None
        for key, load in zip(keys, loads, strict=True):
            try:
                outcomes.append(load())
            except OSError as error:
                if error.errno not in _BAD_FILE_ERRNOS:
                    raise
                if key not in self._bad_files:
                    if bad_file is not None:
                        raise
                    bad_file = key, error
                outcomes.append(LoadOutcome.CORRUPT)
        if bad_file is not None:
            bad_key, reason = bad_file
            if LoadOutcome.HIT not in outcomes:
                raise reason
            if len(self._bad_files) >= _MAX_BAD_FILES:
                self._bad_files.clear()
            self._bad_files.add(bad_key)
            self._log.warning("%s cannot be read, and counts as damaged: %s", self.layout.path_string(bad_key), reason)
        return outcomes

    def load_one(self, key: ObjectKey, buffer: memoryview, check: LoadCheck | None = None) -> LoadOutcome:
        """Read an object. If the folder is gone, this is a miss, too.

        Args:
            check: learns of each part that was read. Reads past the page cache leave it out: their thread had better
                ask the disk for the next object, while another thread checks this one.
        """
        direct = self.direct and is_aligned(buffer)
        path = self.layout.path_string(key)
        try:
            opened = files.open_to_read(path, direct=direct) if self.layout.is_private(path) else None
        except OSError as error:
            self.layout.raise_unless_odd(error)
            return LoadOutcome.MISS
        if opened is None:
            return LoadOutcome.MISS
        descriptor, nbytes = opened
        try:
            if check is not None and not direct:
                return files.read_and_check(descriptor, nbytes, buffer, check)
            return files.read(descriptor, buffer, direct=direct)
        finally:
            os.close(descriptor)

    def check_free_space(self, keys: Sequence[ObjectKey], nbytes: Sequence[int]) -> list[StoreOutcome | None]:
        """Return ``None`` per object that may be stored: it is absent and leaves enough bytes free.

        Nothing is reserved.
        """
        outcomes: list[StoreOutcome | None] = []
        free_bytes = self._mount_guard.free_bytes() if self._keep_free_bytes else 0
        for present, size in zip(self.contains(keys), nbytes, strict=True):
            if present:
                outcomes.append(StoreOutcome.ALREADY_PRESENT)
            elif self._keep_free_bytes and free_bytes - size < self._keep_free_bytes:
                outcomes.append(StoreOutcome.REJECTED)
            else:
                outcomes.append(None)
                free_bytes -= size
        return outcomes

    def store_all(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], seals: Sequence[StoreSeal | None]
    ) -> list[StoreOutcome]:
        """Write the absent objects, in order; the first error of the disk ends the batch.

        If the disk is full, or something else is in the object's place, the object is rejected.
        """
        if not self.prepare_to_write():
            return [StoreOutcome.REJECTED] * len(keys)
        return [
            StoreOutcome.ALREADY_PRESENT if self.has(key) else self.store(key, buffer, seal)
            for key, buffer, seal in zip(keys, buffers, seals, strict=True)
        ]

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Remove objects; absent ones are no error."""
        self._mount_guard.check()
        for key in keys:
            self.layout.unlink(key)

    def prepare_to_write(self) -> bool:
        """Check the folder and register this process. Call it once per batch.

        Returns:
            False if the disk is full.

        Raises:
            OSError: the folder is gone, or cannot be written.
        """
        self._mount_guard.check()
        try:
            self._processes.register()
            if not self._is_counted:
                self._processes.announce_uncounted()
        except OSError as error:
            self._raise_unless_full(error)
            return False
        return True

    def store(self, key: ObjectKey, buffer: memoryview, seal: StoreSeal | None = None) -> StoreOutcome:
        """Write an object whole or not at all.

        If the disk is full, or something else is in the object's place, the object is rejected.

        Args:
            seal: seals the buffer meanwhile; ``None`` if it is sealed.
        """
        path = self.layout.path_string(key)
        temporary = self.layout.temporary(path, self._processes.own_name)
        try:
            if not self.layout.is_private(path):
                raise PermissionError(errno.EPERM, "a link, or a folder that another user can change", path)
            self._write(path, temporary, buffer, seal)
        except OSError as error:
            if error.errno in files.DISK_FULL_ERRNOS:
                self._raise_unless_full(error)
            else:
                self._raise_unless_odd(error)
            return StoreOutcome.REJECTED
        self._is_full = False
        self._bad_files.discard(key)
        return StoreOutcome.STORED

    def folders(self) -> list[Path]:
        """Return the folders that may contain objects."""
        found = self.layout.folders()
        self._mount_guard.check()
        return found

    def objects_in(self, folder: Path) -> list[StoredObject]:
        """Return the objects in one of :meth:`folders`."""
        found = list(self.layout.objects_in(folder))
        self._mount_guard.check()
        return found

    def check(self) -> None:
        """Raise ``OSError`` if the folder is gone."""
        self._mount_guard.check()

    def _checked(self, outcomes: list[LoadOutcome]) -> list[LoadOutcome]:
        """Return the outcomes, unless they are misses because the folder is gone."""
        if LoadOutcome.MISS in outcomes:
            self._mount_guard.check()
        return outcomes

    def _write(self, path: str, temporary: str, buffer: memoryview, seal: StoreSeal | None) -> None:
        direct = self.direct and is_aligned(buffer)
        try:
            files.write(path, temporary, buffer, self._fsync, direct=direct, seal=seal)
        except FileNotFoundError:
            self._mount_guard.check()
            for folder in reversed(Path(path).relative_to(self.layout.root).parents[:-1]):
                files.make_private_folder(self.layout.root / folder)
            files.write(path, temporary, buffer, self._fsync, direct=direct, seal=seal)

    def _raise_unless_odd(self, error: OSError) -> None:
        """Raise the error unless something odd is in the place of one object; the first such thing is logged."""
        self.layout.raise_unless_odd(error, os.R_OK | os.W_OK | os.X_OK)
        if not self._has_warned_of_odd_path:
            self._has_warned_of_odd_path = True
            self._log.warning(
                "%s: an object cannot be stored, since something else has its place: %s; remove that "
                "(only the first one is logged)",
                self.layout.root,
                error,
            )

    def _raise_unless_full(self, error: OSError) -> None:
        """Raise the error unless it means a full disk, which is logged once."""
        if error.errno not in files.DISK_FULL_ERRNOS:
            raise error
        if not self._is_full:
            self._is_full = True
            self._log.warning(
                "%s: %s: stores are rejected until the disk has free space, and loads continue; free some space, or "
                "lower the tier's capacity",
                self.layout.root,
                error,
            )
