"""The checks of objects of full length while their bytes arrive or are copied: they are in the processor's cache then.

A check takes the bytes from the buffer itself, in order and each byte once. So a backend that tells of too few or too
many bytes, or tells too early, does not pass. Only a pass counts: after a failure, the caller verifies the whole
object.
"""

from __future__ import annotations

from abc import abstractmethod

import xxhash

from offload_core.api.errors import ObjectFormatError
from offload_core.api.keys import ObjectKey
from offload_core.api.one_pass import LoadCheck
from offload_core.objects import format as object_format
from offload_core.objects.format import CHECKSUM_BYTES, HEADER_BYTES


class ArrivingBytes(LoadCheck):
    """The bytes of a buffer that a backend fills part by part.

    Args:
        view: the whole buffer.

    Attributes:
        passed: all bytes of the buffer have arrived, and they are the object.
    """

    __slots__ = ("_arrived", "_is_in_order", "passed", "view")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self._arrived = 0
        self._is_in_order = True
        self.passed = False

    def filled(self, nbytes: int) -> bool:
        """See :meth:`LoadCheck.filled`."""
        start = self._arrived
        self._arrived = end = start + nbytes
        self._is_in_order = self._is_in_order and 0 < nbytes <= len(self.view) - start
        self.passed = False
        if self._is_in_order:
            self.take(start, end)
            self.passed = end == len(self.view) and self.is_valid()
        return self.passed

    @abstractmethod
    def take(self, start: int, end: int) -> None:
        """Take the next bytes, from ``start`` to ``end`` of the buffer."""

    @abstractmethod
    def is_valid(self) -> bool:
        """Return whether all bytes, which have been taken now, are the object."""


class ArrivingObject(ArrivingBytes):
    """An object without compression and encryption.

    Args:
        view: the whole buffer.
        key: the name that the object must have.
    """

    __slots__ = ("_digest", "_key")

    def __init__(self, view: memoryview, key: ObjectKey) -> None:
        super().__init__(view)
        self._key = key
        self._digest: xxhash.xxh3_128 | None = None

    @property
    def hash_start(self) -> int | None:
        """See :attr:`LoadCheck.hash_start`: the payload."""
        return HEADER_BYTES if len(self.view) > HEADER_BYTES else None

    def hashed(self, digest: bytes) -> bool:
        """See :meth:`LoadCheck.hashed`."""
        self.passed = False
        if self._arrived == 0 and len(digest) == CHECKSUM_BYTES and self.hash_start is not None:
            self._arrived = len(self.view)
            self.passed = self._is_object(digest)
        return self.passed

    def take(self, start: int, end: int) -> None:
        """Hash bytes of the payload. A buffer that arrives in one piece is hashed in the end."""
        if end - start == len(self.view):
            return
        if self._digest is None:
            self._digest = xxhash.xxh3_128()
        if end > HEADER_BYTES:
            self._digest.update(self.view[max(start, HEADER_BYTES) : end])

    def is_valid(self) -> bool:
        """Return whether the object is whole and has its name."""
        return self._is_object(None if self._digest is None else self._digest.digest())

    def _is_object(self, payload_checksum: bytes | None) -> bool:
        try:
            object_format.verify(self.view, self._key, payload_checksum)
        except ObjectFormatError:
            return False
        return True
