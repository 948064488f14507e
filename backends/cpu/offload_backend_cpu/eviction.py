"""The order of eviction. Pure bookkeeping, for one thread; every operation takes constant time.

``lru`` evicts the least recently used object first.

``slru`` is segmented LRU. The source is Karedla, Love and Wherry, "Caching strategies to improve disk system
performance", IEEE Computer 27(3), 1994. A new object is on *probation*; used again, it is *protected*. Objects on
probation are evicted first. So a scan, many objects that are used only once, does not evict the objects in use. The
protected part has a limit. Beyond it, its least recently used objects are on probation again, as if just used.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

from offload_core.api import ObjectKey

Policy = Literal["lru", "slru"]

PROTECTED_SHARE = 0.8
"""The largest part of the capacity that ``slru`` protects."""


class EvictionOrder:
    """Objects that may be evicted, with their sizes. An object in use is taken out with :meth:`remove`.

    Args:
        policy: ``lru`` or ``slru``.
        capacity: of all objects, in the unit of their sizes.

    Attributes:
        size: the sum of the sizes of all objects.
    """

    def __init__(self, policy: Policy, capacity: int) -> None:
        self.size = 0
        self._segmented = policy == "slru"
        self._protected_limit = int(capacity * PROTECTED_SHARE)
        self._protected_size = 0
        # Least recently used first. OrderedDict finds its first entry at once, also after many were taken from there.
        self._probation: OrderedDict[ObjectKey, int] = OrderedDict()
        self._protected: OrderedDict[ObjectKey, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def add(self, key: ObjectKey, size: int, *, used_again: bool = False) -> None:
        """Add an object as just used; ``used_again`` if it was used before."""
        self.size += size
        if not (used_again and self._segmented):
            self._probation[key] = size
            return
        self._protected[key] = size
        self._protected_size += size
        while self._protected_size > self._protected_limit:
            oldest, its_size = self._protected.popitem(last=False)
            self._protected_size -= its_size
            self._probation[oldest] = its_size

    def record_use(self, key: ObjectKey) -> None:
        """Record that an object was used again."""
        self.add(key, self.remove(key), used_again=True)

    def remove(self, key: ObjectKey) -> int:
        """Remove an object and return its size."""
        size = self._probation.pop(key, None)
        if size is None:
            size = self._protected.pop(key)
            self._protected_size -= size
        self.size -= size
        return size

    def next_victim(self) -> ObjectKey:
        """Return the next object to evict; there must be one."""
        return next(iter(self._probation or self._protected))
