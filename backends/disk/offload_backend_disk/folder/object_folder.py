"""A folder of objects. Everything here blocks, on any thread."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from offload_backend_disk.capacity.database import FULL
from offload_backend_disk.capacity.processes import Owners
from offload_backend_disk.folder import files
from offload_backend_disk.folder.direct_io import is_aligned
from offload_backend_disk.folder.layout import Layout
from offload_backend_disk.folder.mount_guard import Home
from offload_core.api import LoadOutcome, ObjectKey, StoredObject, StoreOutcome

logger = logging.getLogger(__name__)


class ObjectFolder:
    """Objects in a folder, one file each.

    Args:
        home: the folder.
        owners: this process's lock in it, by which its files are known to be its own while they are being written.
        fsync: what is forced to the medium before an object counts as stored.
        keep_free_bytes: what :meth:`reserve` leaves on the file system.

    Attributes:
        direct: whether whole pages are read and written past the page cache; to be set before the first call.
    """

    def __init__(self, home: Home, owners: Owners, fsync: files.Fsync, keep_free_bytes: int = 0) -> None:
        self.layout = Layout(home.root)
        self._home = home
        self._owners = owners
        self._fsync = fsync
        self._keep_free_bytes = keep_free_bytes
        self._is_full = False
        self.direct = False

    def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return, per key, whether its file is there."""
        return [files.exists(self.layout.name(key)) for key in keys]

    def sizes(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Return, per key, the bytes of its file, or ``None`` where there is none."""
        return [self.layout.nbytes(key) for key in keys]

    def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        """Read objects, in order; the first error ends the batch."""
        return [self._load(*item) for item in zip(keys, buffers, strict=True)]

    def _load(self, key: ObjectKey, buffer: memoryview) -> LoadOutcome:
        direct = self.direct and is_aligned(buffer)
        descriptor = files.open_to_read(self.layout.name(key), direct=direct)
        if descriptor is None:
            return LoadOutcome.MISS
        try:
            return files.read(descriptor, buffer, direct=direct)
        finally:
            os.close(descriptor)

    def reserve(self, keys: Sequence[ObjectKey], nbytes: Sequence[int]) -> list[StoreOutcome | None]:
        """Say what is there, and what would leave less than is to be kept free; nothing is reserved."""
        outcomes: list[StoreOutcome | None] = []
        free_bytes = self._home.free_bytes() if self._keep_free_bytes else 0
        for present, size in zip(self.contains(keys), nbytes, strict=True):
            if present:
                outcomes.append(StoreOutcome.ALREADY_PRESENT)
            elif self._keep_free_bytes and free_bytes - size < self._keep_free_bytes:
                outcomes.append(StoreOutcome.REJECTED)
            else:
                outcomes.append(None)
                free_bytes -= size
        return outcomes

    def store_all(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        """Write objects that are not there yet, in order; the first error ends the batch.

        Those for which the disk is full are rejected.
        """
        if not self.prepare_to_write():
            return [StoreOutcome.REJECTED] * len(keys)
        return [
            StoreOutcome.ALREADY_PRESENT if self.contains([key])[0] else self.store(key, buffer)
            for key, buffer in zip(keys, buffers, strict=True)
        ]

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Remove objects; absent ones are no error."""
        for key in keys:
            self.layout.unlink(key)

    def prepare_to_write(self) -> bool:
        """Check that the folder is where it was, and that this process is known as alive; to be done once for a batch.

        Returns:
            Whether there is any room on the disk.

        Raises:
            OSError: the folder is gone with its file system, or cannot be written.
        """
        self._home.check()
        try:
            self._owners.take()
        except OSError as error:
            return self._has_room(error)
        return True

    def store(self, key: ObjectKey, buffer: memoryview) -> StoreOutcome:
        """Write an object whole or not at all; it is rejected when the disk is full."""
        name = self.layout.name(key)
        direct = self.direct and is_aligned(buffer)
        try:
            files.write(name, self.layout.temporary(name, self._owners.owner), buffer, self._fsync, direct=direct)
        except OSError as error:
            self._has_room(error)
            return StoreOutcome.REJECTED
        self._is_full = False
        return StoreOutcome.STORED

    def _has_room(self, error: OSError) -> bool:
        """Return ``False`` for an error that says that the disk is full; raise any other."""
        if error.errno not in FULL:
            raise error
        if not self._is_full:
            self._is_full = True
            logger.warning(
                "%s: %s: stores are rejected until there is room, and loads go on; free some, or give the tier a "
                "smaller capacity",
                self.layout.root,
                error,
            )
        return False

    def folders(self) -> list[Path]:
        """Return the folders that may hold objects."""
        return self.layout.folders()

    def objects_in(self, folder: Path) -> list[StoredObject]:
        """Return the objects in one of :meth:`folders`."""
        return list(self.layout.objects_in(folder))
