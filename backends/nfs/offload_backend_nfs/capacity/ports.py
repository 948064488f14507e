"""What the account of a shared prefix needs of its medium. Everything blocks, and may be called on any thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from offload_core.api import ObjectKey, StoredObject


class SmallObjects(Protocol):
    """Small files of the account, by names with ``/`` in them. All raise ``OSError`` where the medium fails."""

    def create(self, name: str, content: bytes) -> bool:
        """Create ``name`` whole, unless it is there. Of all who try, on all hosts, exactly one gets ``True``."""
        ...

    def read(self, name: str) -> bytes | None:
        """Return what ``name`` holds, ``None`` where it is not there."""
        ...

    def write(self, name: str, content: bytes) -> None:
        """Create or replace ``name``; readers see the old or the new content."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Remove, in order; absent ones are no error."""
        ...

    def names(self, folder: str) -> list[str]:
        """Return the names of files in ``folder``, perhaps of folders too. What is there throughout is among them."""
        ...


class ObjectStore(Protocol):
    """The objects that the account is about."""

    def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return, per key, whether its object is there."""
        ...

    def write_new(self, key: ObjectKey, buffer: memoryview) -> bool:
        """Write an object whole, unless one is there; returns whether it was written."""
        ...

    def pages(self) -> Iterator[Sequence[StoredObject]]:
        """Yield every object, in pages. What is there throughout is in it; what comes or goes meanwhile may be."""
        ...

    def remove(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Remove objects that are there; returns the bytes of each, ``None`` where it was not there.

        Nobody else removes them now. One that is written only while this goes on stays.
        """
        ...

    def unfinished_bytes(self) -> int:
        """Return the bytes of what is being written, or was when its writer died."""
        ...
