"""Objects that a worker keeps at hand in a tier's memory after their load, so that a later load needs no call.

The tier has lent their memory, and they are verified. A view stays as it is until it is given back, even if the tier's
process ends (clause C25). So a copy from it cannot fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from offload_core.api.keys import ObjectKey
from offload_core.tiers.calls.lent_objects import LentObject


class KeptObjects:
    """The lent objects of some loads. For the engine thread.

    The objects of a load are given back together, since the tier releases them together too. Several loads may keep one
    object.
    """

    def __init__(self) -> None:
        self._loads: dict[int, tuple[str, Mapping[ObjectKey, LentObject]]] = {}
        self._by_key: dict[tuple[str, ObjectKey], dict[int, LentObject]] = {}

    def add(self, job_id: int, tier: str, objects: Mapping[ObjectKey, LentObject]) -> None:
        """Keep the objects of a load."""
        self._loads[job_id] = tier, objects
        for key, lent in objects.items():
            self._by_key.setdefault((tier, key), {})[job_id] = lent

    def get(self, tier: str, key: ObjectKey) -> LentObject:
        """Return a kept object. It stays kept.

        Raises:
            KeyError: it is not kept.
        """
        holders = self._by_key.get((tier, key))
        if not holders:
            raise KeyError(f"{key} of tier {tier!r} is not at hand, and its request runs already; please report it")
        return next(iter(holders.values()))

    def take(self, job_ids: Iterable[int]) -> list[LentObject]:
        """Keep the objects of some loads no longer, and return them. Loads that keep nothing are ignored."""
        taken = []
        for job_id in job_ids:
            tier, objects = self._loads.pop(job_id, ("", {}))
            for key, lent in objects.items():
                holders = self._by_key[tier, key]
                del holders[job_id]
                if not holders:
                    del self._by_key[tier, key]
                taken.append(lent)
        return taken

    def take_all(self) -> list[LentObject]:
        """Keep nothing any longer, and return all objects."""
        return self.take(list(self._loads))
