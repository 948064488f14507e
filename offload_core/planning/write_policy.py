"""Write policies: a tier's choice of objects to store, made before a byte of them is copied.

A tier counts a *use* of an object when a store of it is offered, or when it is loaded from another tier. The policy
``second-touch`` stores an object on its second use. Each worker has its own usage log, which lives as long as the
process.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Literal

WritePolicyName = Literal["every", "second-touch", "never"]
"""The values of ``write_policy``."""

USAGE_LOG_KEYS = 1 << 16
"""Maximum number of keys in a tier's usage log, about 20 MiB; the least recently used key is forgotten first."""


class WritePolicy:
    """The write policy of one tier. Thread-safe.

    Args:
        name: ``every`` stores every object. ``second-touch`` stores an object on its second use, if the usage log still
            has the first one. ``never`` stores none.
        usage_log_keys: maximum number of keys in the usage log.
    """

    def __init__(self, name: WritePolicyName, usage_log_keys: int = USAGE_LOG_KEYS) -> None:
        self.name = name
        self._usage_log_keys = usage_log_keys
        self._lock = threading.Lock()
        self._usage_log: OrderedDict[Hashable, _Usage] = OrderedDict()

    def takes_offered(self, key: Hashable) -> bool:
        """Log the offer of a store; return whether the tier takes it."""
        if self.name != "second-touch":
            return self.name == "every"
        return self._log_use(key) != "once"

    def takes_loaded(self, key: Hashable, *, promoted: bool) -> bool:
        """Log a load of the object from another tier; return whether this tier takes the object.

        Args:
            promoted: whether the object comes from a slower tier. Otherwise only a second use is a reason to take it.
        """
        if self.name != "second-touch":
            return promoted and self.name == "every"
        return self._log_use(key) == "again"

    def has_stored(self, key: Hashable) -> None:
        """Note that the tier has the object, so that loads of it from other tiers do not offer it again."""
        if self.name == "second-touch":
            with self._lock:
                if key in self._usage_log:
                    self._usage_log[key] = "and stored"

    def _log_use(self, key: Hashable) -> _Usage:
        with self._lock:
            before = self._usage_log.get(key)
            now: _Usage = "once" if before is None else "and stored" if before == "and stored" else "again"
            self._usage_log[key] = now
            self._usage_log.move_to_end(key)
            if len(self._usage_log) > self._usage_log_keys:
                self._usage_log.popitem(last=False)
            return now


_Usage = Literal["once", "again", "and stored"]


def nothing_stored_problem(names: Iterable[WritePolicyName]) -> str | None:
    """Return the problem of an engine that is to store while every tier's policy is ``never``, or ``None``."""
    if set(names) != {"never"}:
        return None
    return (
        "backends: write_policy is never for all of them, so nothing is stored; set it to every or second-touch for "
        "one of them, or kv_role to kv_consumer for an engine that only loads"
    )
