"""Stores that seal: a backend lets the core compute the checksum of an object while it stores the object.

This is an addition for speed. For a backend without it, the core reads each object once more before the store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from offload_core.api.checked_loads import CHECK_BYTES


class StoreSeal(ABC):
    """The seal of one object while a backend stores the object's buffer. Most backends need only :meth:`parts`."""

    __slots__ = ()

    @property
    @abstractmethod
    def head_bytes(self) -> int:
        """The number of bytes at the beginning of the buffer that are final only after :meth:`seal`."""

    @abstractmethod
    def stored(self, nbytes: int) -> None:
        """Read the next ``nbytes`` bytes of the buffer, now and on this thread.

        The first call stands for the bytes after the first :attr:`head_bytes`. Each call continues where the one before
        it ended. Call it right after you have stored these bytes: then they are in the processor's cache. Calls may be
        left out. Bytes beyond the end of the buffer are ignored, so that a store may begin again.
        """

    @abstractmethod
    def seal(self) -> None:
        """Read the rest of the buffer, and make its first :attr:`head_bytes` bytes final. Harmless when repeated.

        Raises:
            ObjectFormatError: the core cannot store this object; it must not become visible.
        """

    def parts(self, buffer: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Yield all parts of the buffer with their offsets in it, in the order in which to store them. Seal it too.

        Store each part before you take the next one. The beginning of a large buffer comes last.
        """
        if len(buffer) < 2 * CHECK_BYTES:
            self.seal()
            yield 0, buffer
            return
        for start in range(self.head_bytes, len(buffer), CHECK_BYTES):
            part = buffer[start : start + CHECK_BYTES]
            yield start, part
            self.stored(len(part))
        self.seal()
        yield 0, buffer[: self.head_bytes]
