"""Write policies: which objects a tier is given to keep, decided before a byte of them is copied.

A *touch* of an object, as one tier sees it, is an offered store or a load of it from another tier. Each worker has its
own record of touches, which lives as long as the process.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Literal

from offload_core.api.keys import ObjectKey
from offload_core.config.model import WritePolicyName

REMEMBERED_KEYS = 1 << 16
"""Keys in a tier's record of touches, some 20 MiB; what was touched longest ago is forgotten first."""


class WritePolicy:
    """The write policy of one tier. Thread-safe.

    Args:
        name: ``every`` object is taken; on its ``second-touch``, while the first one is remembered; or ``never``.
        remembered_keys: how many objects' touches are remembered.
    """

    def __init__(self, name: WritePolicyName, remembered_keys: int = REMEMBERED_KEYS) -> None:
        self.name = name
        self._remembered_keys = remembered_keys
        self._lock = threading.Lock()
        self._touched: OrderedDict[ObjectKey, _Touched] = OrderedDict()

    def takes_offered(self, key: ObjectKey) -> bool:
        """Note that a store was offered; return whether the tier takes it."""
        if self.name != "second-touch":
            return self.name == "every"
        return self._touch(key) != "once"

    def takes_loaded(self, key: ObjectKey, *, promoted: bool) -> bool:
        """Note that the object was loaded from another tier; return whether this one takes it.

        Args:
            promoted: whether it is kept here because it came from a slower tier; else only a second touch is a reason.
        """
        if self.name != "second-touch":
            return promoted and self.name == "every"
        return self._touch(key) == "again"

    def has_stored(self, key: ObjectKey) -> None:
        """Note that the tier has the object, so that loads of it from other tiers do not offer it again."""
        if self.name == "second-touch":
            with self._lock:
                if key in self._touched:
                    self._touched[key] = "and stored"

    def _touch(self, key: ObjectKey) -> _Touched:
        with self._lock:
            before = self._touched.get(key)
            now: _Touched = "once" if before is None else "and stored" if before == "and stored" else "again"
            self._touched[key] = now
            self._touched.move_to_end(key)
            if len(self._touched) > self._remembered_keys:
                self._touched.popitem(last=False)
            return now


_Touched = Literal["once", "again", "and stored"]


def nothing_stored_problem(names: Iterable[WritePolicyName]) -> str | None:
    """Return what to tell an operator whose engine is to store while every tier's policy is ``never``, or ``None``."""
    if set(names) != {"never"}:
        return None
    return (
        "backends: write_policy is never for all of them, so nothing is stored; set it to every or second-touch for "
        "one of them, or kv_role to kv_consumer for an engine that only loads"
    )
