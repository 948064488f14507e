"""A seal of an object that shows in the object's bytes whether, and when, a backend has called it."""

from __future__ import annotations

from offload_core.api.one_pass import StoreSeal

HEAD_BYTES = 64


class RecordingSeal(StoreSeal):
    """Spoils the beginning of an object, and makes it right when it is sealed.

    Args:
        buffer: the whole object, writable, complete and right.
    """

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._head = bytes(buffer[:HEAD_BYTES])
        buffer[: len(self._head)] = bytes(byte ^ 0xFF for byte in self._head)

    @property
    def head_bytes(self) -> int:
        """See :meth:`StoreSeal.head_bytes`."""
        return len(self._head)

    def stored(self, nbytes: int) -> None:
        """See :meth:`StoreSeal.stored`."""

    def seal(self) -> None:
        """See :meth:`StoreSeal.seal`."""
        self._buffer[: len(self._head)] = self._head
