"""The seal of an object while it is written or copied, so that its bytes are read from the processor's cache."""

from __future__ import annotations

import xxhash

from offload_core.api.keys import ObjectKey
from offload_core.api.one_pass import StoreSeal
from offload_core.objects import format as object_format
from offload_core.objects.format import HEADER_BYTES


class DepartingObject(StoreSeal):
    """An object without compression and encryption, whose payload is complete and whose header is missing.

    Nothing is read or written after :meth:`end`: the memory may have another owner then.

    Args:
        view: the whole object, writable.
        key: its name.
    """

    __slots__ = ("_digest", "_is_over", "_key", "_read", "_view")

    def __init__(self, view: memoryview, key: ObjectKey) -> None:
        self._view = view
        self._key = key
        self._read = HEADER_BYTES
        self._digest: xxhash.xxh3_128 | None = None
        self._is_over = False

    @property
    def head_bytes(self) -> int:
        """The bytes of the header."""
        return HEADER_BYTES

    def stored(self, nbytes: int) -> None:
        """See :meth:`StoreSeal.stored`."""
        if self._is_over:
            return
        if self._digest is None:
            self._digest = xxhash.xxh3_128()
        start, self._read = self._read, min(self._read + max(0, nbytes), len(self._view))
        self._digest.update(self._view[start : self._read])

    def seal(self) -> None:
        """See :meth:`StoreSeal.seal`."""
        if self._is_over:
            return
        if self._digest is not None:
            self.stored(len(self._view) - self._read)
        object_format.seal(self._view, self._key, self._digest.digest() if self._digest is not None else None)
        self._is_over = True

    def end(self) -> None:
        """End the backend's use of this seal, with the call that it was for."""
        self._is_over = True
