"""A simulated tier: names and sizes of objects within a capacity, in the order of eviction of the real backends."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from offload_core.api.eviction_order import EvictionOrder, EvictionPolicy


@dataclass
class Traffic:
    """Objects and bytes that a tier has moved."""

    written_objects: int = 0
    written_bytes: int = 0
    read_objects: int = 0
    read_bytes: int = 0
    evicted_objects: int = 0
    evicted_bytes: int = 0
    peak_bytes: int = 0


class BoundedTier:
    """A tier that stores and loads at once, without errors.

    Args:
        capacity_bytes: ``None`` for no limit.
        max_objects: limit on their number.
        low_watermark: an eviction continues until at most this part of the capacity is used.
        high_watermark: an eviction begins when this part of the capacity would be exceeded.

    Attributes:
        overflowed: whether ``max_objects`` has evicted an object, or kept one from being stored.
    """

    def __init__(
        self,
        capacity_bytes: int | None,
        eviction: EvictionPolicy,
        max_objects: int = sys.maxsize,
        *,
        low_watermark: float = 1.0,
        high_watermark: float = 1.0,
    ) -> None:
        self._capacity = sys.maxsize if capacity_bytes is None else capacity_bytes
        self._low_bytes = low_watermark * self._capacity
        self._high_bytes = high_watermark * self._capacity
        self._max_objects = max_objects
        self.overflowed = False
        self._order: EvictionOrder[int] = EvictionOrder(eviction, self._capacity)
        self.traffic = Traffic()
        self.holds = self._order.__contains__
        """Return whether an object is present."""

    def load(self, names: Iterable[int], size: int) -> None:
        """Load objects of one size, all of which are present."""
        for name in names:
            self._order.record_use(name)
            self.traffic.read_objects += 1
            self.traffic.read_bytes += size

    def store(self, name: int, size: int, *, spare: bool) -> None:
        """Store an absent object. A spare one is stored below the low watermark only, so nothing is evicted for it."""
        traffic, order = self.traffic, self._order
        if size > self._capacity or (spare and order.size + size > self._low_bytes):
            return
        if order.size + size > self._high_bytes:
            target = min(self._low_bytes, self._capacity - size)
            while order.size > target:
                self._evict()
        if len(order) >= self._max_objects:
            self.overflowed = True
            self._evict()
        order.add(name, size, spare=spare)
        traffic.written_objects += 1
        traffic.written_bytes += size
        traffic.peak_bytes = max(traffic.peak_bytes, order.size)

    def touch(self, name: int, *, spare: bool) -> None:
        """Make an object the most recently used one, if it is present."""
        if name in self._order:
            self._order.touch(name, spare=spare)

    def _evict(self) -> None:
        self.traffic.evicted_bytes += self._order.remove(self._order.next_victim())
        self.traffic.evicted_objects += 1
