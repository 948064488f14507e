"""A check of an object that records the bytes that it is told of."""

from __future__ import annotations

import xxhash

from offload_core.api.one_pass import LoadCheck


class RecordingCheck(LoadCheck):
    """Copies each part of the buffer when it is told of it, or the whole one when it gets its digest.

    Args:
        buffer: the object's buffer.
        right: the object's bytes; by default the check finds no object right, so that a backend's own checks are tried.

    Attributes:
        told: the bytes of all parts so far.
        problem: the first call that was wrong.
    """

    def __init__(self, buffer: memoryview, right: bytes | None = None) -> None:
        self._buffer = buffer
        self._right = right
        self.told = bytearray()
        self.problem: str | None = None

    @property
    def hash_start(self) -> int | None:
        """See :attr:`LoadCheck.hash_start`: not all of the buffer, as in an engine."""
        return len(self._buffer) // 3

    def hashed(self, digest: bytes) -> bool:
        """See :meth:`LoadCheck.hashed`."""
        if self.told:
            self.problem = self.problem or f"hashed() after filled() of {len(self.told)} bytes"
        self.told[:] = self._buffer
        if digest != xxhash.xxh3_128_digest(self._buffer[self.hash_start :]):
            self.problem = (
                self.problem
                or f"the digest {digest.hex()}, which is not that of its buffer from byte {self.hash_start} on"
            )
        return self._right is not None and bytes(self.told) == self._right

    def filled(self, nbytes: int) -> bool:
        """See :meth:`LoadCheck.filled`."""
        left = len(self._buffer) - len(self.told)
        if not 0 < nbytes <= left:
            self.problem = self.problem or f"filled({nbytes}) with {left} of {len(self._buffer)} bytes left"
        self.told += self._buffer[len(self.told) :][: max(0, nbytes)]
        return self._right is not None and bytes(self.told) == self._right
