"""The interfaces through which an account uses its medium. All calls block, and may come from any thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from offload_core.api import ObjectKey, StoredObject, StoreSeal


class AccountFiles(Protocol):
    """The small files of the account. Names may contain ``/``. All calls raise ``OSError`` if the medium fails."""

    def create(self, name: str, content: bytes) -> bool:
        """Create the file whole, unless it exists. Of all callers on all hosts, exactly one gets ``True``."""
        ...

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """Return the content of a file, or ``None`` if there is no such file.

        Raises:
            ForeignFileError: it has more than ``max_bytes``, or is no regular file.
        """
        ...

    def write(self, name: str, content: bytes) -> None:
        """Create or replace a file. Readers see the old or the new content."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Delete files in order. An absent file is no error."""
        ...

    def set_aside(self, name: str) -> str:
        """Move a damaged file out of the way, so that an operator can look at it. Return the words for its new place.

        Only some files are kept so; later ones are deleted. A failure of the medium is part of the words.
        """
        ...

    def names(self, folder: str) -> list[str]:
        """Return the names of the files in ``folder``, and perhaps of its folders.

        A file that exists during the whole call is always among them.
        """
        ...

    def write_times(self, folder: str) -> dict[str, float]:
        """Return, by name, when each file in ``folder`` was written: seconds since the epoch by the storage's clock."""
        ...


class Removal(NamedTuple):
    """The result of a removal of several objects."""

    nbytes: list[int | None]
    """Per object its bytes, or ``None`` for an object that did not exist."""
    refused: frozenset[ObjectKey] = frozenset()
    """The objects that the medium refuses to delete. They still exist."""
    refusal: OSError | None = None
    """The error of a refused object."""


class ObjectFiles(Protocol):
    """The objects whose bytes the account counts."""

    def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return, per key, whether its object exists."""
        ...

    def write_new(self, key: ObjectKey, buffer: memoryview, seal: StoreSeal | None = None) -> bool:
        """Write an object whole, unless it exists. Return whether this call wrote it.

        Args:
            seal: seals the buffer meanwhile; ``None`` if it is sealed.
        """
        ...

    def pages(self, progress: Callable[[], None] = lambda: None) -> Iterator[Sequence[StoredObject]]:
        """Yield all objects, in pages.

        An object that exists during the whole scan is always included. An object that comes or goes meanwhile may be.

        Args:
            progress: called often, also within a long page. Raises nothing.
        """
        ...

    def remove(self, keys: Sequence[ObjectKey]) -> Removal:
        """Remove objects.

        No other process removes these objects now. An object that is written only during this call stays.

        Raises:
            OSError: the medium failed. Some objects may be gone.
        """
        ...

    def unfinished_bytes(self) -> int:
        """Return the bytes of objects that are being written, or whose writer died during the write.

        Leftovers of dead writers on this host are removed first.
        """
        ...
