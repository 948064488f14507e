"""The reservations of a backend that are neither used nor released yet."""

from __future__ import annotations

from typing import NamedTuple

from offload_core.api import ObjectKey


class HeldReservation(NamedTuple):
    """A reservation in the folder's account.

    Args:
        number: its number in the account.
        nbytes: the bytes that it reserves.
    """

    number: int
    nbytes: int


class HeldReservations:
    """Reservations by key; a key may have several, one per call that reserved. For one thread."""

    def __init__(self) -> None:
        self._sizes: dict[ObjectKey, dict[int, int]] = {}

    def add(self, key: ObjectKey, reservation: HeldReservation) -> None:
        """Add a reservation for ``key``."""
        self._sizes.setdefault(key, {})[reservation.number] = reservation.nbytes

    def take(self, key: ObjectKey, number: int) -> HeldReservation | None:
        """Remove one reservation and return it; ``None`` if it is not held any more."""
        sizes = self._sizes.get(key, {})
        nbytes = sizes.pop(number, None)
        if key in self._sizes and not sizes:
            del self._sizes[key]
        return None if nbytes is None else HeldReservation(number, nbytes)

    def take_smallest(self, key: ObjectKey, nbytes: int) -> HeldReservation | None:
        """Remove the smallest reservation of at least ``nbytes`` bytes and return it; ``None`` if there is none.

        A larger one may belong to another call for the same key.
        """
        fitting = [(size, number) for number, size in self._sizes.get(key, {}).items() if size >= nbytes]
        return self.take(key, min(fitting)[1]) if fitting else None
