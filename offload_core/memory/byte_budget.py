"""A limit on the staging bytes that some part of the core holds."""

from __future__ import annotations

import threading


class ByteBudget:
    """A number of bytes that may be held at once. Thread-safe.

    While a process that was killed is not gone, nobody can give its bytes back. They can be replaced: then the limit is
    higher by as much.

    Args:
        limit_bytes: maximum number of bytes in use.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._replaced_bytes = 0
        self._held_bytes = 0
        self._lock = threading.Lock()

    @property
    def limit_bytes(self) -> int:
        """The limit in bytes now."""
        return self._limit_bytes + self._replaced_bytes

    @property
    def held_bytes(self) -> int:
        """The bytes in use now. They may exceed the limit for a while after :meth:`withdraw`."""
        return self._held_bytes

    def try_take(self, nbytes: int) -> bool:
        """Take ``nbytes`` bytes; return ``False``, and take nothing, at the limit."""
        with self._lock:
            if self._held_bytes + nbytes > self.limit_bytes:
                return False
            self._held_bytes += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """Undo :meth:`try_take`."""
        with self._lock:
            self._held_bytes -= nbytes

    def replace(self, nbytes: int) -> None:
        """Raise the limit by ``nbytes`` bytes that are in use and cannot be given back for now."""
        with self._lock:
            self._replaced_bytes += nbytes

    def replace_held(self) -> int:
        """Replace all bytes in use that have not been replaced yet; return their number."""
        with self._lock:
            replaced = max(0, self._held_bytes - self._replaced_bytes)
            self._replaced_bytes += replaced
            return replaced

    def withdraw(self, nbytes: int) -> None:
        """Lower the limit by ``nbytes`` replaced bytes, since they have been given back."""
        with self._lock:
            self._replaced_bytes -= nbytes
