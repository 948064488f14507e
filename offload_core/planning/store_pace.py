"""The pace of stores: how many objects a step may begin to store, so that the workers need not drop any.

A fast engine completes more bytes in one step than staging memory, or the buffer on its device, has room for. Objects
can wait as long as the engine keeps their blocks. Pure arithmetic, for the engine thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping


class StorePace:
    """The room that one step's stores have.

    Args:
        pending: returns the name of the pack of each object whose store has begun and not ended.
    """

    def __init__(self, pending: Callable[[], Iterable[str]]) -> None:
        self._pending = pending
        self._object_bytes: Mapping[str, int] = {}
        self._room_bytes = self._left_bytes = math.inf
        self._is_empty = True
        """True if no store is on its way."""

    def set_room(self, object_bytes: Mapping[str, int], room_bytes: float) -> None:
        """Set the room of the rank that has the least; infinite by default.

        Args:
            object_bytes: per name of a pack, the bytes that one of its objects takes.
            room_bytes: bytes of all stores on their way.
        """
        self._object_bytes, self._room_bytes = object_bytes, room_bytes

    @property
    def is_limited(self) -> bool:
        """True if the workers' room has a limit."""
        return self._room_bytes != math.inf

    def begin_step(self) -> None:
        """Begin a step. Call it before the step's first store begins."""
        if not self.is_limited:
            return
        pending = [self._object_bytes.get(pack, 0) for pack in self._pending()]
        self._is_empty = not pending
        self._left_bytes = self._room_bytes - sum(pending)

    def take(self, pack: str) -> None:
        """Count an object whose store begins in this step."""
        self._left_bytes -= self._object_bytes.get(pack, 0)
        self._is_empty = False

    def admits(self, pack: str) -> bool:
        """Return whether there is room for an object. One object alone always has room."""
        return self._is_empty or self._object_bytes.get(pack, 0) <= self._left_bytes
