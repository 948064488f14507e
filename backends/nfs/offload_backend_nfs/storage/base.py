"""What the backend needs of shared storage: blocking operations on whole objects, by their names under a root.

Names are relative, with ``/`` between folders. Every operation runs on one of the tier's threads and is one try; who
calls it tries again (:mod:`offload_backend_nfs.storage.retry`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from offload_core.api import LoadOutcome

TEMPORARY_FOLDER = ".temporary"
"""Holds what is being written, so that what killed writers left is found without looking at every folder."""
TEMPORARY_LIFE_SECONDS = 86_400.0
"""What is older than this and still temporary is nobody's."""


class Entry(NamedTuple):
    """One thing in a folder."""

    name: str
    """Within the folder."""
    is_folder: bool
    nbytes: int
    modified_seconds: float
    """Since the epoch."""


class Medium(ABC):
    """Shared storage. Thread-safe; every method blocks, and raises ``OSError`` when the storage fails."""

    lookup_batch = 64
    """How many names one call of :meth:`sizes` should be given: what takes some 0.05 s."""

    @abstractmethod
    def open(self) -> None:
        """Connect, and check that the place is there.

        Raises:
            OSError: it is not, or cannot be used; names it.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of connections. Harmless when repeated or without :meth:`open`."""

    @abstractmethod
    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Return, per name, the object's bytes, or ``None`` where nothing is. Never lists a folder."""

    @abstractmethod
    def load(self, name: str, buffer: memoryview) -> LoadOutcome:
        """Fill ``buffer``; one of another size than the object's is ``CORRUPT``, what has vanished a ``MISS``."""

    @abstractmethod
    def store(self, name: str, buffer: memoryview) -> None:
        """Write the object whole or not at all, over any that is there."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Write a small object whole if nothing has that name; return whether this call did.

        Of several callers on all hosts at most one is told ``True``. After an error it may be there or not.
        """

    def store_new(self, name: str, buffer: memoryview) -> bool:
        """Write the object whole if nothing has that name; return whether this call did. See :meth:`create`."""
        return self.create(name, bytes(buffer))

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; absent ones are no error."""

    @abstractmethod
    def entries(self, folder: str) -> list[Entry]:
        """Return what is in a folder, ``""`` for the root; nothing where there is none. Temporaries are passed over."""

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, as :meth:`entries` does, but perhaps faster."""
        return [entry.name for entry in self.entries(folder)]

    @abstractmethod
    def read_small(self, name: str) -> bytes | None:
        """Return an object whose size is not known, or ``None``."""

    def write_small(self, name: str, data: bytes) -> None:
        """Write a small object over any that is there."""
        self.store(name, memoryview(data))

    def sweep(self, stopped: Callable[[], bool]) -> int:
        """Remove what writers that are gone had begun, until ``stopped``; return how many pieces it were."""
        return 0
