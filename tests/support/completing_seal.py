"""A seal whose object is complete only after it."""

from __future__ import annotations

from collections.abc import Callable

from offload_core.api.one_pass import StoreSeal

_BEFORE, _AFTER = b"\xbb", b"\xaa"


class CompletingSeal(StoreSeal):
    """Completes the beginning of an object.

    Args:
        nbytes: the object's length.
        head_bytes: the length of its beginning.
        wait: called before the object is complete.

    Attributes:
        buffer: the object.
        complete: its content in the end.
        told: the bytes that each call of :meth:`stored` told of.
    """

    def __init__(self, nbytes: int, head_bytes: int, wait: Callable[[], object] = lambda: None) -> None:
        self._head_bytes = min(head_bytes, nbytes)
        self._wait = wait
        rest = (bytes(range(1, 252)) * (nbytes // 251 + 1))[: nbytes - self._head_bytes]
        self.buffer = memoryview(bytearray(_BEFORE * self._head_bytes + rest))
        self.complete = _AFTER * self._head_bytes + rest
        self.told: list[int] = []

    @property
    def head_bytes(self) -> int:
        return self._head_bytes

    def stored(self, nbytes: int) -> None:
        self.told.append(nbytes)

    def seal(self) -> None:
        self._wait()
        self.buffer[: self._head_bytes] = _AFTER * self._head_bytes
