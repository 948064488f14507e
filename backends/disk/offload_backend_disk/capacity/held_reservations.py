"""The reservations of a backend that are neither used nor released yet."""

from __future__ import annotations

from typing import NamedTuple

from offload_core.api import ObjectKey


class HeldReservation(NamedTuple):
    """A reservation in the folder's account.

    Args:
        number: its number in the account.
        nbytes: the bytes that it reserves.
        is_spare: it is for a spare object.
    """

    number: int
    nbytes: int
    is_spare: bool = False


class HeldReservations:
    """Reservations by key; a key may have several, one per call that reserved. For one thread."""

    def __init__(self) -> None:
        self._held: dict[ObjectKey, dict[int, HeldReservation]] = {}

    def add(self, key: ObjectKey, reservation: HeldReservation) -> None:
        """Add a reservation for ``key``."""
        self._held.setdefault(key, {})[reservation.number] = reservation

    def take(self, key: ObjectKey, number: int) -> HeldReservation | None:
        """Remove one reservation and return it; ``None`` if it is not held any more."""
        held = self._held.get(key, {})
        reservation = held.pop(number, None)
        if key in self._held and not held:
            del self._held[key]
        return reservation

    def take_smallest(self, key: ObjectKey, nbytes: int) -> HeldReservation | None:
        """Remove the smallest reservation of at least ``nbytes`` bytes and return it; ``None`` if there is none.

        A larger one may belong to another call for the same key.
        """
        fitting = [(one.nbytes, one.number) for one in self._held.get(key, {}).values() if one.nbytes >= nbytes]
        return self.take(key, min(fitting)[1]) if fitting else None
