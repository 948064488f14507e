"""Jobs of a :class:`~offload_core.elsewhere.host_store.HostStore`: objects, their places, and their ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from offload_core.api.keys import ObjectKey


@dataclass(frozen=True)
class PlacedObject:
    """An object and the number of its place in the other system's memory.

    Args:
        nbytes: size of the place; ``None`` if all objects of the pack have one size.
    """

    key: ObjectKey
    place: int
    nbytes: int | None = None


@dataclass(frozen=True)
class EndedJob:
    """The end of a job.

    Args:
        moved: its objects that a tier has now, or that are in their places now.
        seconds: time since its submission.
    """

    job_id: int
    objects: tuple[PlacedObject, ...]
    moved: frozenset[ObjectKey]
    seconds: float


@dataclass(eq=False)
class Job:
    """A job under way. An object that stands there twice ends twice."""

    job_id: int
    objects: tuple[PlacedObject, ...]
    submitted: float = field(default_factory=time.monotonic)
    moved: set[ObjectKey] = field(default_factory=set)
    ended: int = 0

    def end(self, keys: Sequence[ObjectKey], moved: Sequence[ObjectKey]) -> bool:
        """Note the end of some objects; returns whether it was the last one."""
        self.ended += len(keys)
        self.moved.update(moved)
        return self.ended == len(self.objects)

    def deepest_first(self) -> list[ObjectKey]:
        """Return the moved keys, the last object first, each once: objects come in the order of their prefix."""
        return [key for key in dict.fromkeys(placed.key for placed in reversed(self.objects)) if key in self.moved]
