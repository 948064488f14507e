"""What observers are told (the hook ``offload_observe``): what happened to a tier, per batch and never per block.

Events are values: they hold no buffer, no backend and no exception, and may be kept.
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
        seconds: how long opening took.
    """

    seconds: float


@dataclass(frozen=True)
class TierClosed(Event):
    """The tier's backend is closed, or its ``close`` has raised; nothing more comes from it."""


@dataclass(frozen=True)
class TierFailing(Event):
    """A kind of operation has begun to fail. Told once, until it works again.

    Args:
        operation: what fails.
        cause: type and text of the backend's exception, or the deadline that was missed.
    """

    operation: Operation
    cause: str


@dataclass(frozen=True)
class TierRecovered(Event):
    """A kind of operation that was failing has succeeded, some time after its last failure.

    Args:
        operation: what works again.
    """

    operation: Operation


@dataclass(frozen=True)
class TierUnavailable(Event):
    """The tier is not used for now: too many calls failed in a row, or its backend hangs in ``open``.

    Args:
        cause: the last failure.
    """

    cause: str


@dataclass(frozen=True)
class TierAvailable(Event):
    """The tier is used again.

    Args:
        seconds: how long it was not, or not without reserve.
    """

    seconds: float


@dataclass(frozen=True)
class LoadsEnded(Event):
    """A batch of objects has been read and checked, or could not be. The four counts add up to the batch.

    Args:
        loaded: objects that came and are whole.
        missing: objects that were not there.
        damaged: objects that were there and not whole; :class:`ObjectsDamaged` names them.
        failed: objects of a batch that ended in an error: all or none of it.
        nbytes: bytes of the loaded objects.
        seconds: how long the backend and the check took.
    """

    loaded: int
    missing: int
    damaged: int
    failed: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class StoresEnded(Event):
    """A batch of objects has been written, or could not be. The four counts add up to the batch.

    Args:
        stored: objects written.
        already_present: objects that were there before.
        rejected: objects that the backend had no room for.
        failed: objects of a batch that ended in an error: all or none of it.
        nbytes: bytes of the objects written.
        seconds: how long the backend took.
    """

    stored: int
    already_present: int
    rejected: int
    failed: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class ObjectsDamaged(Event):
    """Objects were found that are not what was stored; the core deletes them.

    Args:
        keys: their names.
    """

    keys: tuple[ObjectKey, ...]


@dataclass(frozen=True)
class ObjectsEvicted(Event):
    """The backend removed objects to make room for others.

    Args:
        keys: their names.
    """

    keys: tuple[ObjectKey, ...]
