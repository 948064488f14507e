"""Which objects make room for others, and how much of it.

``lru``: what was used longest ago goes first. ``slru``, segmented LRU (Karedla, Love and Wherry, "Caching strategies to
improve disk system performance", IEEE Computer 27(3), 1994): what was used since it was stored is protected, and goes
after all that was not; when the protected objects come to more than their part of the capacity, those used longest ago
take their place among the others again, as the last to go. One pass over many prompts that never come again then leaves
in place what many requests share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from offload_backend_disk.capacity.pins import Pins
from offload_backend_disk.capacity.rows import Records, Totals
from offload_backend_disk.folder.layout import Layout
from offload_core.api import ObjectKey

Policy = Literal["lru", "slru"]

PROTECTED_PART = 0.8
_EXTRA_AT_ONCE = 64


@dataclass(frozen=True)
class Limits:
    """How much may be in a folder.

    Args:
        capacity_bytes: limit on all objects and reservations.
        high_watermark: an eviction begins when this part of the capacity would be exceeded.
        low_watermark: and goes on until no more than this part is in use.
        keep_free_bytes: what must be left free on the file system.
        policy: which objects go first.
    """

    capacity_bytes: int
    high_watermark: float = 1.0
    low_watermark: float = 0.95
    keep_free_bytes: int = 0
    policy: Policy = "lru"


class Evictor:
    """Makes room in the transactions of an account, which come one at a time.

    Args:
        free_bytes: tells how much is free on the file system.
    """

    def __init__(self, layout: Layout, pins: Pins, limits: Limits, free_bytes: Callable[[], int]) -> None:
        self._layout = layout
        self._pins = pins
        self._limits = limits
        self._free_bytes = free_bytes
        self._draining = False

    def note_use(self, records: Records, used: Iterable[tuple[ObjectKey, int]], clock: Callable[[], int]) -> None:
        """Write down when objects were used."""
        segmented = self._limits.policy == "slru"
        records.touch(used, protect=segmented)
        if segmented:
            excess = records.totals().protected - int(PROTECTED_PART * self._limits.capacity_bytes)
            records.demote(excess, clock)

    def make_room(self, records: Records, nbytes: int) -> bool:
        """Make room for ``nbytes`` more; returns whether there is. Where it cannot be made, nothing is evicted.

        An eviction that goes on to the low watermark does so in steps, with each request for room, since all processes
        wait for this one meanwhile.
        """
        totals, limits = records.totals(), self._limits
        if not totals.scanned:
            return False
        if totals.used + nbytes > limits.high_watermark * limits.capacity_bytes:
            self._draining = True
        lacking = self._lacking(totals, nbytes)
        if lacking > totals.objects or not self._evict_at_least(records, lacking):
            return False
        if self._draining:
            target = min(int(limits.low_watermark * limits.capacity_bytes), limits.capacity_bytes - nbytes)
            self._draining = self._evict_some(records, records.totals().used - target)
        return True

    def _lacking(self, totals: Totals, nbytes: int) -> int:
        lacking = totals.used + nbytes - self._limits.capacity_bytes
        if self._limits.keep_free_bytes:
            # What is reserved may not be on the disk yet.
            free_bytes = self._free_bytes() - totals.reserved
            lacking = max(lacking, self._limits.keep_free_bytes + nbytes - free_bytes)
        return lacking

    def _evict_at_least(self, records: Records, nbytes: int) -> bool:
        while nbytes > 0:
            victims = self._victims(records, nbytes)
            if sum(size for _, size in victims) < nbytes:
                return False
            nbytes -= self._evict(records, victims)
        return True

    def _evict_some(self, records: Records, nbytes: int) -> bool:
        """Return whether there is more to evict."""
        victims = self._victims(records, nbytes, _EXTRA_AT_ONCE)
        return bool(victims) and self._evict(records, victims) < nbytes

    def _victims(self, records: Records, nbytes: int, most: int | None = None) -> list[tuple[ObjectKey, int]]:
        """Return what is to go first, of at least ``nbytes`` bytes in all, or less."""
        found: list[tuple[ObjectKey, int]] = []
        if nbytes > 0:
            for key, size in records.in_order():
                if self._pins.is_free(key):
                    found.append((key, size))
                    nbytes -= size
                if nbytes <= 0 or len(found) == most:
                    break
        return found

    def _evict(self, records: Records, victims: Iterable[tuple[ObjectKey, int]]) -> int:
        """Return how many bytes have gone."""
        gone = 0
        for key, size in victims:
            with self._pins.without(key) as free:
                if free:
                    self._layout.unlink(key)
                    records.removed.append(key)
                    gone += size
        records.drop(records.removed)
        return gone
