"""The objects that this process has stored on one tier, loaded from it or found there."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from offload_core.api.keys import ObjectKey

MAX_KNOWN_OBJECTS = 1 << 16
"""Objects that are remembered per tier; they take about 16 MiB."""


class KnownObjects:
    """A bounded memory of objects on one tier; the least recently used go first. Thread-safe.

    It may be wrong, since others remove objects too.
    """

    def __init__(self, limit: int = MAX_KNOWN_OBJECTS) -> None:
        self._limit = limit
        self._keys: OrderedDict[ObjectKey, None] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, key: ObjectKey) -> bool:
        with self._lock:
            if key not in self._keys:
                return False
            self._keys.move_to_end(key)
            return True

    def add(self, keys: Iterable[ObjectKey]) -> None:
        """Remember objects."""
        with self._lock:
            for key in keys:
                self._keys[key] = None
                self._keys.move_to_end(key)
            while len(self._keys) > self._limit:
                self._keys.popitem(last=False)

    def discard(self, keys: Iterable[ObjectKey]) -> None:
        """Forget objects."""
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)
