"""The objects that another system has locked, each with a tier that has it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from offload_core.api.keys import ObjectKey


@dataclass
class _Lock:
    count: int = 0
    tier: str | None = None


class LockedKeys:
    """Counts the locks of objects, and remembers the tier that a lookup has found. Thread-safe."""

    def __init__(self) -> None:
        self._locks: dict[ObjectKey, _Lock] = {}
        self._guard = threading.Lock()

    def add(self, found: Iterable[tuple[ObjectKey, str]]) -> None:
        """Lock each object once more."""
        with self._guard:
            for key, tier in found:
                lock = self._locks.setdefault(key, _Lock())
                lock.count += 1
                lock.tier = tier

    def remove(self, keys: Iterable[ObjectKey]) -> None:
        """Take one lock of each object away. An object without a lock is no error."""
        with self._guard:
            for key in keys:
                if (lock := self._locks.get(key)) is not None:
                    lock.count -= 1
                    if not lock.count:
                        del self._locks[key]

    def has(self, key: ObjectKey) -> bool:
        """Return whether an object is locked."""
        with self._guard:
            return key in self._locks

    def tier_of(self, key: ObjectKey) -> str | None:
        """Return the tier of a locked object, as far as is known."""
        with self._guard:
            lock = self._locks.get(key)
            return None if lock is None else lock.tier

    def doubt(self, keys: Iterable[ObjectKey]) -> None:
        """Forget the tiers of objects. Their locks stay."""
        with self._guard:
            for key in keys:
                if (lock := self._locks.get(key)) is not None:
                    lock.tier = None
