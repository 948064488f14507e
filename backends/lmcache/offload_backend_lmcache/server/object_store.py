"""The storage that the module serves, as the sessions see it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from offload_backend_lmcache.wire.frames import Entry, Found, Status


class StoreError(Exception):
    """The storage cannot serve a request. The text is for the client."""


class Content(NamedTuple):
    """An object that a reader has pinned."""

    status: Status
    """``HIT``, ``ABSENT`` or ``DAMAGED``. Only a hit has a payload."""
    payload: memoryview = memoryview(b"")
    checksum: int = 0


class Writing(Protocol):
    """Memory for an object that is not visible yet. Call one of the two methods, once."""

    payload: memoryview

    def commit(self, checksum: int) -> bool:
        """Make the object visible, with the checksum of its payload. Return whether it is."""
        ...

    def abort(self) -> None:
        """Release the memory."""
        ...


class ObjectStore(Protocol):
    """Objects under names. Thread-safe; each wait ends at its ``deadline`` on the monotonic clock.

    Every method may raise :class:`StoreError`.
    """

    def find(self, names: Sequence[bytes], deadline: float) -> list[Found]:
        """Return presence and size of each object."""
        ...

    def reading(self, entries: Sequence[Entry], deadline: float) -> AbstractContextManager[Sequence[Content]]:
        """Pin objects until the context ends. An object of another size than its entry's is ``DAMAGED``.

        No object is there in two sizes.
        """
        ...

    def begin_write(self, entry: Entry, deadline: float) -> Writing | Status:
        """Return memory for an object, or ``PRESENT``, or ``FULL``."""
        ...

    def delete(self, names: Sequence[bytes], deadline: float) -> list[Status]:
        """Remove objects. ``BUSY``: a reader or writer held it until the deadline."""
        ...
