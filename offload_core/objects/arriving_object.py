"""The check of an object of full length while its bytes arrive, so that they are hashed from the processor's cache."""

from __future__ import annotations

import xxhash

from offload_core.api.checked_loads import LoadCheck
from offload_core.api.errors import ObjectFormatError
from offload_core.api.keys import ObjectKey
from offload_core.objects import format as object_format
from offload_core.objects.format import HEADER_BYTES


class ArrivingObject(LoadCheck):
    """An object without compression that a backend loads part by part.

    The check hashes the buffer itself, in order and each byte once. So a backend that tells of too few or too many
    bytes, or tells too early, does not pass. Only a pass counts: after a failure, the caller verifies the whole object.

    Args:
        view: the whole buffer.
        key: the name that the object must have.
        encrypted: the object must be encrypted. The check is then that of its stored bytes.

    Attributes:
        passed: all bytes of the buffer have arrived, and they are the object.
    """

    __slots__ = ("_arrived", "_digest", "_is_in_order", "_key", "_verify", "_view", "passed")

    def __init__(self, view: memoryview, key: ObjectKey, *, encrypted: bool = False) -> None:
        self._verify = object_format.verify_stored if encrypted else object_format.verify
        self._view = view
        self._key = key
        self._digest: xxhash.xxh3_128 | None = None
        self._arrived = 0
        self._is_in_order = True
        self.passed = False

    def filled(self, nbytes: int) -> None:
        """See :meth:`LoadCheck.filled`."""
        view, start = self._view, self._arrived
        self._arrived = end = start + nbytes
        self._is_in_order = self._is_in_order and 0 < nbytes <= len(view) - start
        self.passed = False
        if not self._is_in_order:
            return
        if nbytes == len(view):
            self.passed = self._is_valid()
            return
        if self._digest is None:
            self._digest = xxhash.xxh3_128()
        if end > HEADER_BYTES:
            self._digest.update(view[max(start, HEADER_BYTES) : end])
        if end == len(view):
            self.passed = self._is_valid(self._digest.digest())

    def _is_valid(self, payload_checksum: bytes | None = None) -> bool:
        try:
            self._verify(self._view, self._key, payload_checksum)
        except ObjectFormatError:
            return False
        return True
