"""The order of eviction of a bounded backend. Pure bookkeeping, for one thread; every operation takes constant time.

``lru`` evicts the least recently used object first.

``slru`` is segmented LRU. The source is Karedla, Love and Wherry, "Caching strategies to improve disk system
performance", IEEE Computer 27(3), 1994. A new object is on *probation*; used again, it is *protected*. Objects on
probation are evicted first. So a scan, many objects that are used only once, does not evict the objects in use. The
protected part has a limit. Beyond it, its least recently used objects are on probation again, as if just used.

Both evict *spare* objects before all others. A spare object that is used again is spare no longer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, Literal, TypeVar

Key = TypeVar("Key", bound=Hashable)
EvictionPolicy = Literal["lru", "slru"]

PROTECTED_SHARE = 0.8
"""The largest part of the capacity that ``slru`` protects."""


class EvictionOrder(Generic[Key]):
    """Objects that may be evicted, with their sizes. An object in use is taken out with :meth:`remove`.

    Args:
        policy: ``lru`` or ``slru``.
        capacity: of all objects, in the unit of their sizes.

    Attributes:
        size: the sum of the sizes of all objects.
    """

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.size = 0
        self._segmented = policy == "slru"
        self._protected_limit = int(capacity * PROTECTED_SHARE)
        self._protected_size = 0
        # Least recently used first. OrderedDict finds its first entry at once, also after many were taken from there.
        self._spare: OrderedDict[Key, int] = OrderedDict()
        self._probation: OrderedDict[Key, int] = OrderedDict()
        self._protected: OrderedDict[Key, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._spare) + len(self._probation) + len(self._protected)

    def __contains__(self, key: Key) -> bool:
        return key in self._spare or key in self._probation or key in self._protected

    def add(self, key: Key, size: int, *, used_again: bool = False, spare: bool = False) -> None:
        """Add an object as just used; ``used_again`` if it was used before.

        Args:
            spare: evict it before all objects that are not spare.
        """
        self.size += size
        if used_again and self._segmented:
            self._protect(key, size)
        else:
            (self._spare if spare else self._probation)[key] = size

    def record_use(self, key: Key) -> None:
        """Record that an object was used again."""
        self.add(key, self.remove(key), used_again=True)

    def touch(self, key: Key, *, spare: bool) -> None:
        """Make an object the most recently used one, without counting that as a use.

        Args:
            spare: whether it is spare from now on.
        """
        if key in self._protected and not spare:
            self._protected.move_to_end(key)
        else:
            self.add(key, self.remove(key), spare=spare)

    def remove(self, key: Key) -> int:
        """Remove an object and return its size."""
        for objects in (self._spare, self._probation):
            size = objects.pop(key, None)
            if size is not None:
                break
        else:
            size = self._protected.pop(key)
            self._protected_size -= size
        self.size -= size
        return size

    def next_victim(self) -> Key:
        """Return the next object to evict; there must be one."""
        return next(iter(self._spare or self._probation or self._protected))

    def _protect(self, key: Key, size: int) -> None:
        self._protected[key] = size
        self._protected_size += size
        while self._protected_size > self._protected_limit:
            oldest, its_size = self._protected.popitem(last=False)
            self._protected_size -= its_size
            self._probation[oldest] = its_size
