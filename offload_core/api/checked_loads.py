"""Loads in one call: a backend that lets the core check its objects while it reads them.

This is an addition for speed. The objects of a backend without it are checked after the load.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

CHECK_BYTES = 512 * 1024
"""A good number of bytes for one call of :meth:`LoadCheck.filled`: they are still in the processor's cache then."""


class LoadCheck(ABC):
    """The check of one object while a backend fills the object's buffer."""

    __slots__ = ()

    @abstractmethod
    def filled(self, nbytes: int) -> bool:
        """Check the next ``nbytes`` bytes of the buffer, now and on this thread. They must be final.

        The first call stands for the beginning of the buffer. Each call continues where the one before it ended. If a
        read has to begin again, do not call this any more: the core then checks the whole object after the load.

        Returns:
            Whether the buffer is full now and the core has found the whole object right. Then a checksum of the
            backend's own is not needed. ``False`` says nothing about the bytes.
        """
