"""The medium as an account needs it: the account's small files in a folder of their own, and the objects."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence

from offload_backend_nfs.capacity.ports import Removal
from offload_backend_nfs.lookup_cache import LookupCache
from offload_backend_nfs.storage import layout
from offload_backend_nfs.storage.base import TEMPORARY_FOLDER, Entry, Medium
from offload_backend_nfs.storage.failures import DeletionRefusedError
from offload_backend_nfs.storage.retry import Retrier
from offload_backend_nfs.storage.temporaries import is_temporary
from offload_core.api import ObjectKey, StoredObject, StoreSeal

_FOLDER = ".offload-core"  # part of the format on the medium
"""The folder of the account, under the root. The account writes nothing elsewhere."""
_DAMAGED_FOLDER = "damaged"
_MAX_DAMAGED_FILES = 16


class MediumAdapter:
    """A medium behind the interfaces of :mod:`offload_backend_nfs.capacity.ports`. Transient failures are retried.

    Args:
        lookup_cache: learns of objects that come and go.
        lookup_cache_seconds: the time for which its answers are valid.
    """

    def __init__(
        self, medium: Medium, retrier: Retrier, lookup_cache: LookupCache, lookup_cache_seconds: float
    ) -> None:
        self._medium = medium
        self._call = retrier.call
        self._stopped = lambda: retrier.stopped
        self._lookup_cache = lookup_cache
        self._lookup_cache_seconds = lookup_cache_seconds

    def create(self, name: str, content: bytes) -> bool:
        """See :meth:`AccountFiles.create`."""
        return self._call(self._medium.create, f"{_FOLDER}/{name}", content)

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """See :meth:`AccountFiles.read`."""
        return self._call(self._medium.read_small, f"{_FOLDER}/{name}", max_bytes)

    def write(self, name: str, content: bytes) -> None:
        """See :meth:`AccountFiles.write`."""
        self._call(self._medium.write_small, f"{_FOLDER}/{name}", content)

    def delete(self, names: Sequence[str]) -> None:
        """See :meth:`AccountFiles.delete`."""
        self._call(self._medium.delete, [f"{_FOLDER}/{name}" for name in names])

    def set_aside(self, name: str) -> str:
        """See :meth:`AccountFiles.set_aside`."""
        try:
            if len(self.names(_DAMAGED_FOLDER)) >= _MAX_DAMAGED_FILES:
                self.delete([name])
                return f"it is deleted, because {_FOLDER}/{_DAMAGED_FOLDER} has {_MAX_DAMAGED_FILES} files already"
            place = f"{_FOLDER}/{_DAMAGED_FOLDER}/{name.replace('/', '-')}-{secrets.token_hex(4)}"
            self._call(self._medium.move, f"{_FOLDER}/{name}", place)
        except OSError as error:
            return f"it cannot be moved: {error}"
        return f"it is kept as {place}"

    def names(self, folder: str) -> list[str]:
        """See :meth:`AccountFiles.names`."""
        return self._call(self._medium.names, f"{_FOLDER}/{folder}".rstrip("/"))

    def write_times(self, folder: str) -> dict[str, float]:
        """See :meth:`AccountFiles.write_times`."""
        return {entry.name: entry.modified_seconds for entry in self._entries(f"{_FOLDER}/{folder}")}

    def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See :meth:`ObjectFiles.contains`."""
        answers = dict(zip(keys, self._lookup_cache.presence(keys, self._lookup_cache_seconds), strict=True))
        unknown = [key for key, present in answers.items() if present is None]
        if unknown:
            asked = time.monotonic()
            for key, size in zip(unknown, self._sizes(unknown), strict=True):
                self._lookup_cache.add_answer(key, size is not None, asked, size)
                answers[key] = size is not None
        return [bool(answers[key]) for key in keys]

    def write_new(self, key: ObjectKey, buffer: memoryview, seal: StoreSeal | None = None) -> bool:
        """See :meth:`ObjectFiles.write_new`."""
        began = time.monotonic()
        present: bool | None = None
        new = False
        try:
            # Not retried: after an error the object may exist, and its writer would be unknown.
            new = self._medium.store_new(layout.name_of(key), buffer, seal)
            present = True
        finally:
            self._lookup_cache.add_change(key, present, began, len(buffer) if present and new else None)
        return new

    def pages(self, progress: Callable[[], None] = lambda: None) -> Iterator[Sequence[StoredObject]]:
        """See :meth:`ObjectFiles.pages`. Each folder of objects is one page."""
        folders = [""]
        for pattern in layout.FOLDERS:
            found = ((folder, entry) for folder in folders for entry in self._entries(folder, progress))
            folders = [
                f"{folder}/{entry.name}".lstrip("/")
                for folder, entry in found
                if entry.is_folder and pattern.fullmatch(entry.name)
            ]
        for folder in folders:
            yield layout.objects_in(folder, self._entries(folder, progress))

    def remove(self, keys: Sequence[ObjectKey]) -> Removal:
        """See :meth:`ObjectFiles.remove`."""
        began = time.monotonic()
        sizes = self._sizes(keys)
        present: bool | None = None
        try:
            existing = [layout.name_of(key) for key, size in zip(keys, sizes, strict=True) if size is not None]
            self._call(self._medium.delete, existing)
            present = False
        except DeletionRefusedError as error:
            return Removal(sizes, frozenset(key for key in keys if layout.name_of(key) in error.names), error)
        finally:
            for key in keys:
                self._lookup_cache.add_change(key, present, began)
        return Removal(sizes)

    def unfinished_bytes(self) -> int:
        """See :meth:`ObjectFiles.unfinished_bytes`."""
        self._call(self._medium.remove_leftovers, self._stopped)
        return sum(entry.nbytes for entry in self._entries(TEMPORARY_FOLDER) if is_temporary(entry.name))

    def _sizes(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        return self._call(self._medium.sizes, [layout.name_of(key) for key in keys])

    def _entries(self, folder: str, progress: Callable[[], None] = lambda: None) -> list[Entry]:
        return self._call(self._medium.entries, folder, progress)
