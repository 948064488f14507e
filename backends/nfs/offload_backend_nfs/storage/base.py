"""The interface to shared storage: blocking operations on whole objects, by their names under a root.

Names are relative, with ``/`` between folders. Every operation runs on one of the tier's threads and tries once. The
caller retries (:mod:`offload_backend_nfs.storage.retry`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from offload_core.api import LoadCheck, LoadOutcome, StoreSeal

TEMPORARY_FOLDER = ".temporary"
"""Holds objects while they are written. So leftovers of killed writers are found without a scan of every folder."""
TEMPORARY_LIFE_SECONDS = 86_400.0
"""A temporary older than this, by the clock of the storage, has no living writer."""
MAX_SMALL_BYTES = 16 * 1024**2
"""The most bytes of a control file."""


class Entry(NamedTuple):
    """One file or folder in a folder."""

    name: str
    """The name within the folder."""
    is_folder: bool
    nbytes: int
    modified_seconds: float
    """Seconds since the epoch."""


class Medium(ABC):
    """Shared storage. Thread-safe; every method blocks, and raises ``OSError`` if the storage fails."""

    lookup_batch = 64
    """The number of names for one call of :meth:`sizes`: a call should take about 0.05 s."""

    @abstractmethod
    def open(self) -> None:
        """Connect, and check that the storage exists.

        Raises:
            OSError: it does not exist or cannot be used; the error names it.
        """

    @abstractmethod
    def close(self) -> None:
        """Close connections. Harmless if repeated or without :meth:`open`."""

    @abstractmethod
    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Return, per name, the object's bytes, or ``None`` if there is no object. Never lists a folder."""

    @abstractmethod
    def load(self, name: str, buffer: memoryview, check: LoadCheck | None = None) -> LoadOutcome:
        """Fill ``buffer``. An object of another size is ``CORRUPT``; an absent object is a ``MISS``.

        Args:
            check: learns of each part of the buffer that is filled.

        Raises:
            UnreadableObjectError: perhaps only this object cannot be read.
            OSError: the storage failed.
        """

    @abstractmethod
    def store(self, name: str, buffer: memoryview, seal: StoreSeal | None = None) -> None:
        """Write the object whole or not at all. An existing object is replaced.

        Args:
            seal: seals the buffer meanwhile; ``None`` if it is sealed.

        Raises:
            BadPathError: only this object cannot be written.
            OSError: the medium failed, or is full.
        """

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Write a small object whole if the name is free. Return whether this call wrote it.

        Of several callers on all hosts, at most one gets ``True``. After an error, the object may exist or not.
        """

    def store_new(self, name: str, buffer: memoryview, seal: StoreSeal | None = None) -> bool:
        """Write the object whole if the name is free. Return whether this call wrote it.

        See :meth:`create` and :meth:`store`.
        """
        if seal is not None:
            seal.seal()
        return self.create(name, bytes(buffer))

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Delete objects. An absent object is no error.

        Raises:
            DeletionRefusedError: the storage refuses to delete some objects, and all others are deleted.
            OSError: the storage failed. Some objects may be deleted.
        """

    @abstractmethod
    def entries(self, folder: str, progress: Callable[[], None] = lambda: None) -> list[Entry]:
        """Return the entries of a folder, ``""`` for the root. An absent folder has none. Temporaries are left out.

        Args:
            progress: called now and then while a long listing proceeds, if the storage lists in parts.
        """

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, as :meth:`entries` does, but perhaps faster."""
        return [entry.name for entry in self.entries(folder)]

    @abstractmethod
    def read_small(self, name: str, max_bytes: int = MAX_SMALL_BYTES) -> bytes | None:
        """Return a small object, or ``None`` if there is no object. Never waits for another process.

        Raises:
            ForeignFileError: it has more than ``max_bytes``, or is no regular file. Not more than that is read.
        """

    @abstractmethod
    def move(self, name: str, target: str) -> None:
        """Rename a small object, or anything else that has its name. An absent object is no error."""

    def write_small(self, name: str, data: bytes) -> None:
        """Write a small object. An existing object is replaced."""
        self.store(name, memoryview(data))

    def remove_leftovers(self, stopped: Callable[[], bool]) -> int:
        """Remove the temporaries of dead writers, until ``stopped`` returns ``True``. Return the number removed."""
        return 0
