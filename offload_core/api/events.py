"""The events that the hook ``offload_observe`` receives: one per batch or change of a tier, never one per block.

Events are values. They hold no buffer, no backend and no exception, so an observer may keep them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from offload_core.api.keys import ObjectKey

Operation = Literal["lookup", "load", "store", "delete"]


@dataclass(frozen=True)
class Event:
    """Base of all events.

    Args:
        tier: the tier's name in the configuration.
    """

    tier: str


@dataclass(frozen=True)
class TierOpened(Event):
    """The tier's backend is open.

    Args:
        seconds: duration of the call of ``open``.
    """

    seconds: float


@dataclass(frozen=True)
class TierClosed(Event):
    """The tier's backend is closed, or its ``close`` has raised. No event of this backend follows."""


@dataclass(frozen=True)
class TierFailing(Event):
    """A kind of operation has begun to fail. The event comes once, until the operation works again.

    Args:
        operation: the operation that fails.
        cause: the type and text of the backend's exception, or the deadline that was missed.
    """

    operation: Operation
    cause: str


@dataclass(frozen=True)
class TierRecovered(Event):
    """A kind of operation that was failing has succeeded, some time after its last failure.

    Args:
        operation: the operation that works again.
    """

    operation: Operation


@dataclass(frozen=True)
class TierUnavailable(Event):
    """The tier is out of use for now: too many calls failed in a row, or its backend hangs in ``open``.

    Args:
        cause: the last failure.
    """

    cause: str


@dataclass(frozen=True)
class TierAvailable(Event):
    """The tier is in use again.

    Args:
        seconds: duration of the time out of use, the trial calls included.
    """

    seconds: float


@dataclass(frozen=True)
class LoadsEnded(Event):
    """A load of a batch of objects has ended. The four counts add up to the size of the batch.

    Args:
        loaded: objects that were loaded and verified.
        missing: objects that were absent.
        damaged: objects that were present and damaged; :class:`ObjectsDamaged` names them.
        failed: objects of a batch that ended in an error. An error fails the whole batch.
        nbytes: bytes of the loaded objects.
        seconds: duration of the backend's calls and of the check.
    """

    loaded: int
    missing: int
    damaged: int
    failed: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class StoresEnded(Event):
    """A store of a batch of objects has ended. The four counts add up to the size of the batch.

    Args:
        stored: objects that were written.
        already_present: objects that were present before.
        rejected: objects for which the backend had no capacity.
        failed: objects of a batch that ended in an error. An error fails the whole batch.
        nbytes: bytes of the objects that were written.
        seconds: duration of the backend's calls.
    """

    stored: int
    already_present: int
    rejected: int
    failed: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class ObjectsDamaged(Event):
    """A load found objects that differ from the stored bytes. The core deletes them.

    Args:
        keys: the names of the objects.
    """

    keys: tuple[ObjectKey, ...]


@dataclass(frozen=True)
class ObjectsEvicted(Event):
    """The backend evicted objects to free capacity for others.

    Args:
        keys: the names of the objects.
    """

    keys: tuple[ObjectKey, ...]
