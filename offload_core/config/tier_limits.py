"""What the core allows a tier: how long its calls may take, and how many may fail before it is left alone."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

_MIB = 1024 * 1024


@dataclass(frozen=True)
class TierLimits:
    """Limits under the names that the configuration's keys have, globally and per backend. The defaults stand here."""

    open_timeout_seconds: float = 30.0
    lookup_timeout_seconds: float = 1.0
    load_timeout_seconds: float = 30.0
    load_timeout_seconds_per_mib: float = 0.05
    store_timeout_seconds: float = 30.0
    close_timeout_seconds: float = 1.0
    breaker_failures: int = 5
    breaker_pause_seconds: float = 1.0
    breaker_max_pause_seconds: float = 60.0

    @classmethod
    def of(cls, settings: object) -> TierLimits:
        """Take every limit from the attribute of ``settings`` that has its name."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})

    def overridden_by(self, keys: object) -> TierLimits:
        """Return these limits with those in place that ``keys``, one backend's, has not left at ``None``."""
        given = {field.name: getattr(keys, field.name) for field in fields(self)}
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    def load_seconds(self, nbytes: int) -> float:
        """Return how long a load of ``nbytes`` may take."""
        return self.load_timeout_seconds + self.load_timeout_seconds_per_mib * nbytes / _MIB

    @property
    def longest_seconds(self) -> float:
        """The longest of the deadlines: a thread that is longer in one call is stuck."""
        deadlines = (self.open_timeout_seconds, self.lookup_timeout_seconds, self.load_timeout_seconds)
        return max(*deadlines, self.store_timeout_seconds, self.close_timeout_seconds)
