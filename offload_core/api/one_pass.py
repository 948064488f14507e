"""One pass over the bytes: the core checks or seals an object while a backend loads or stores it.

This is an addition for speed. The objects of a backend without it are checked after the load, and sealed before the
store. The core then reads them once more from memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

CHECK_BYTES = 1024**2
"""A good number of bytes for one part of an object: they are still in the processor's cache afterwards.

With smaller parts, threads wait for the interpreter's lock more often.
"""


class LoadCheck(ABC):
    """The check of one object while a backend fills the object's buffer."""

    __slots__ = ()

    @abstractmethod
    def filled(self, nbytes: int) -> bool:
        """Check the next ``nbytes`` bytes of the buffer, now and on this thread. They must be final.

        The first call stands for the beginning of the buffer. Each call continues where the one before it ended. If a
        read of an unfinished object has to begin again, do not call this any more: the core then checks the whole
        object after the load.

        Returns:
            Whether the buffer is full now and the core has found the whole object right. Then a checksum of the
            backend's own is not needed. The buffer must not be written again, since the core does not check it a second
            time. ``False`` says nothing about the bytes.
        """

    @property
    def hash_start(self) -> int | None:
        """The first byte of the part of the buffer whose digest :meth:`hashed` takes; ``None`` if it takes none."""
        return None

    def hashed(self, digest: bytes) -> bool:
        """Check the whole buffer, in place of all calls of :meth:`filled`.

        This is for a backend whose bytes another process has written to the memory of the buffer. There they are in the
        processor's cache. That process must compute the digest from the buffer itself, when all bytes are final. A
        digest of other memory, or one that was stored, would hide damage.

        Args:
            digest: XXH3-128 of all bytes from :attr:`hash_start` on: 16 bytes in canonical form, as ``xxhash`` returns.

        Returns:
            See :meth:`filled`. After ``False`` the core checks the whole object itself.
        """
        return False


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
        it ended. Call it right before or after you store these bytes: then they are in the processor's cache. Calls may
        be left out. Bytes beyond the end of the buffer are ignored, so that a store may begin again.
        """

    @abstractmethod
    def seal(self) -> None:
        """Read the rest of the buffer, and make its first :attr:`head_bytes` bytes final. Harmless when repeated.

        Raises:
            ObjectFormatError: the core cannot store this object; it must not become visible.
        """

    def parts(self, buffer: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Yield all parts of the buffer with their offsets in it, in the order in which to store them. Seal it too.

        Store each part before you take the next one. The beginning of a large buffer comes last. All other parts but
        the first begin at multiples of :data:`CHECK_BYTES`, and each is read before it is yielded. On Linux 6.18 with
        ext4, this lets the page cache keep a written file in larger pieces, so that a later read is faster.
        """
        if len(buffer) < 2 * CHECK_BYTES:
            self.seal()
            yield 0, buffer
            return
        for begin in range(0, len(buffer), CHECK_BYTES):
            start = max(begin, self.head_bytes)
            part = buffer[start : begin + CHECK_BYTES]
            self.stored(len(part))
            yield start, part
        self.seal()
        yield 0, buffer[: self.head_bytes]
