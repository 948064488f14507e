"""The medium as an account needs it: its small objects in a folder of their own, and the objects it is about."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from offload_backend_nfs.lookup_cache import KnownKeys
from offload_backend_nfs.storage import layout
from offload_backend_nfs.storage.base import TEMPORARY_FOLDER, Entry, Medium
from offload_backend_nfs.storage.retry import Retrier
from offload_core.api import ObjectKey, StoredObject

FOLDER = ".offload-core"
"""Under the root; beside it nothing of the account is written anywhere."""


class AccountMedium:
    """See :mod:`offload_backend_nfs.capacity.ports`. What fails for a passing reason is tried again.

    Args:
        known: told of what comes and goes.
        lookup_life_seconds: how long what is known of an object is good.
    """

    def __init__(self, medium: Medium, retrier: Retrier, known: KnownKeys, lookup_life_seconds: float) -> None:
        self._medium = medium
        self._call = retrier.call
        self._known = known
        self._lookup_life_seconds = lookup_life_seconds

    def create(self, name: str, content: bytes) -> bool:
        """See :meth:`SmallObjects.create`."""
        return self._call(self._medium.create, f"{FOLDER}/{name}", content)

    def read(self, name: str) -> bytes | None:
        """See :meth:`SmallObjects.read`."""
        return self._call(self._medium.read_small, f"{FOLDER}/{name}")

    def write(self, name: str, content: bytes) -> None:
        """See :meth:`SmallObjects.write`."""
        self._call(self._medium.write_small, f"{FOLDER}/{name}", content)

    def delete(self, names: Sequence[str]) -> None:
        """See :meth:`SmallObjects.delete`."""
        self._call(self._medium.delete, [f"{FOLDER}/{name}" for name in names])

    def names(self, folder: str) -> list[str]:
        """See :meth:`SmallObjects.names`."""
        return self._call(self._medium.names, f"{FOLDER}/{folder}".rstrip("/"))

    def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See :meth:`ObjectStore.contains`."""
        known = dict(zip(keys, self._known.recall(keys, self._lookup_life_seconds), strict=True))
        unknown = [key for key, present in known.items() if present is None]
        if unknown:
            asked = time.monotonic()
            for key, size in zip(unknown, self._sizes(unknown), strict=True):
                self._known.saw(key, size is not None, asked, size)
                known[key] = size is not None
        return [bool(known[key]) for key in keys]

    def write_new(self, key: ObjectKey, buffer: memoryview) -> bool:
        """See :meth:`ObjectStore.write_new`."""
        began = time.monotonic()
        present: bool | None = None
        new = False
        try:
            # Not tried again: after an error it may be there, and nobody could say whose it is.
            new = self._medium.store_new(layout.name_of(key), buffer)
            present = True
        finally:
            self._known.changed(key, present, began, len(buffer) if present and new else None)
        return new

    def pages(self) -> Iterator[Sequence[StoredObject]]:
        """See :meth:`ObjectStore.pages`; one page per folder of objects."""
        folders = [""]
        for pattern in layout.FOLDERS:
            found = ((folder, entry) for folder in folders for entry in self._entries(folder))
            folders = [
                f"{folder}/{entry.name}".lstrip("/")
                for folder, entry in found
                if entry.is_folder and pattern.fullmatch(entry.name)
            ]
        for folder in folders:
            yield layout.objects_in(folder, self._entries(folder))

    def remove(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """See :meth:`ObjectStore.remove`."""
        began = time.monotonic()
        sizes = self._sizes(keys)
        present: bool | None = None
        try:
            there = [layout.name_of(key) for key, size in zip(keys, sizes, strict=True) if size is not None]
            self._call(self._medium.delete, there)
            present = False
        finally:
            for key in keys:
                self._known.changed(key, present, began)
        return sizes

    def unfinished_bytes(self) -> int:
        """See :meth:`ObjectStore.unfinished_bytes`."""
        return sum(entry.nbytes for entry in self._entries(TEMPORARY_FOLDER))

    def _sizes(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        return self._call(self._medium.sizes, [layout.name_of(key) for key in keys])

    def _entries(self, folder: str) -> list[Entry]:
        return self._call(self._medium.entries, folder)
