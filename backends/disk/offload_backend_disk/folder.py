"""A folder of objects. Everything here blocks, on any thread."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from offload_backend_disk import files
from offload_backend_disk.direct import is_aligned
from offload_backend_disk.layout import Layout
from offload_core.backend import LoadOutcome, StoredObject, StoreOutcome
from offload_core.keys import ObjectKey


class ObjectFolder:
    """Objects under ``root``, one file each.

    Args:
        owner: names this process's files while they are being written; nobody else uses the name.
        fsync: what is forced to the medium before an object counts as stored.

    Attributes:
        direct: whether whole pages are read and written past the page cache; to be set before the first call.
    """

    def __init__(self, root: Path, owner: str, fsync: files.Fsync) -> None:
        self.layout = Layout(root)
        self._owner = owner
        self._fsync = fsync
        self.direct = False

    def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return, per key, whether its file is there."""
        return [files.exists(self.layout.name(key)) for key in keys]

    def load(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], spares: Sequence[int | None]
    ) -> list[LoadOutcome]:
        """Read objects, in order; the first error ends the batch.

        Args:
            spares: per key an open descriptor of its file, for the case that the file was evicted since, or ``None``;
                closed in the end.
        """
        try:
            return [self._load(*item) for item in zip(keys, buffers, spares, strict=True)]
        finally:
            for spare in spares:
                if spare is not None:
                    os.close(spare)

    def _load(self, key: ObjectKey, buffer: memoryview, spare: int | None) -> LoadOutcome:
        direct = self.direct and is_aligned(buffer)
        descriptor = files.open_to_read(self.layout.name(key), direct=direct)
        if descriptor is None:
            return LoadOutcome.MISS if spare is None else files.read(spare, buffer)
        try:
            return files.read(descriptor, buffer, direct=direct)
        finally:
            os.close(descriptor)

    def store_all(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        """Write objects that are not there yet, in order; the first error ends the batch."""
        return [self._store_new(*item) for item in zip(keys, buffers, strict=True)]

    def _store_new(self, key: ObjectKey, buffer: memoryview) -> StoreOutcome:
        if self.contains([key])[0]:
            return StoreOutcome.ALREADY_PRESENT
        self.store(key, buffer)
        return StoreOutcome.STORED

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Remove objects; absent ones are no error."""
        for key in keys:
            self.layout.unlink(key)

    def store(self, key: ObjectKey, buffer: memoryview) -> None:
        """Write an object whole or not at all."""
        name = self.layout.name(key)
        direct = self.direct and is_aligned(buffer)
        files.write(name, self.layout.temporary(name, self._owner), buffer, self._fsync, direct=direct)

    def folders(self) -> list[Path]:
        """Return the folders that may hold objects."""
        return self.layout.folders()

    def objects_in(self, folder: Path) -> list[StoredObject]:
        """Return the objects in one of :meth:`folders`."""
        return list(self.layout.objects_in(folder))
