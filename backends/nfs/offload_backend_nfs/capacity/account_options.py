"""The limits and durations by which an account is kept."""

from __future__ import annotations

from dataclasses import dataclass

_UNITS_PER_CAPACITY = 64
_SMALLEST_UNIT_BYTES = 1024 * 1024


@dataclass(frozen=True)
class AccountOptions:
    """The options of an account. All processes must use the same values.

    Args:
        capacity_bytes: limit on all objects under the URL.
        low_watermark: the part of the capacity at which an eviction stops.
        high_watermark: the part of the capacity above which an eviction begins.
        grace_seconds: the time between the selection of an object for eviction and its deletion.
        lease_seconds: a process whose lease was not renewed for this long is taken for dead.
        quota_unit_bytes: bytes that a process adds to its quota beyond its need. ``None`` means a 64th of the
            capacity, or 0 if that is less than 1 MiB.
    """

    capacity_bytes: int
    low_watermark: float = 0.8
    high_watermark: float = 0.9
    grace_seconds: float = 60.0
    lease_seconds: float = 60.0
    quota_unit_bytes: int | None = None

    @property
    def quota_unit(self) -> int:
        """Bytes that a process adds to its quota beyond its need."""
        if self.quota_unit_bytes is not None:
            return self.quota_unit_bytes
        unit = self.capacity_bytes // _UNITS_PER_CAPACITY
        return unit if unit >= _SMALLEST_UNIT_BYTES else 0
