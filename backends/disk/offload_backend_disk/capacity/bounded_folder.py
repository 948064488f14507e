"""What a tier with a capacity does around its folder: it keeps the folder's account. Blocks, on any thread."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from offload_backend_disk.capacity.account import Account
from offload_backend_disk.capacity.database import FULL
from offload_backend_disk.folder.object_folder import ObjectFolder
from offload_core.api import ObjectKey, StoreOutcome

_TRY_AGAIN_SECONDS = 1.0


class Room(NamedTuple):
    """What became of a request for room: per key a reservation, or the reason why there is none."""

    reservations: list[int | None]
    outcomes: list[StoreOutcome | None]
    evicted: list[ObjectKey]


class BoundedFolder:
    """A folder under the limit that its account keeps, for all processes together."""

    def __init__(self, folder: ObjectFolder, account: Account) -> None:
        self._folder = folder
        self._account = account
        self._closed_by: OSError | None = None
        self._next_try_seconds = 0.0

    def open(self) -> None:
        """Open the account, and settle what processes that were killed have left.

        Raises:
            OSError: the folder cannot even be read. One that cannot be written can still be loaded from.
        """
        try:
            self._open_account()
        except OSError:
            if not os.access(self._folder.layout.root, os.R_OK | os.X_OK):
                raise

    def is_usable(self) -> bool:
        """Return whether the account can be used; one that could not be opened is tried again."""
        try:
            self._reopen()
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Let go of the account. Idempotent."""
        self._account.close()

    def pin(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Keep all processes from evicting objects until :meth:`unpin`; returns the sizes of those that are there."""
        return self._account.pin(keys) if self._closed_by is None else self._folder.sizes(keys)

    def unpin(self, keys: Sequence[ObjectKey]) -> None:
        """Undo :meth:`pin`, for the keys whose size it told."""
        self._account.unpin(keys)

    def reserve(self, keys: Sequence[ObjectKey], nbytes: Sequence[int]) -> Room:
        """Reserve room for what is not there yet, evicting what is to go first."""
        present = self._folder.contains(keys)
        wanted = [(key, size) for key, size, there in zip(keys, nbytes, present, strict=True) if not there]
        granted, evicted = self._reserve(wanted)
        self._account.touch([key for key, there in zip(keys, present, strict=True) if there])
        rest = iter(granted)
        reservations = [None if there else next(rest) for there in present]
        outcomes = [
            StoreOutcome.ALREADY_PRESENT if there else StoreOutcome.REJECTED if reservation is None else None
            for there, reservation in zip(present, reservations, strict=True)
        ]
        return Room(reservations, outcomes, evicted)

    def give_back(self, reservations: Sequence[int]) -> None:
        """End reservations that were not used."""
        self._account.settle([], reservations)

    def store(
        self,
        keys: Sequence[ObjectKey],
        buffers: Sequence[memoryview],
        reservations: Sequence[int | None],
        used: set[int],
    ) -> list[StoreOutcome]:
        """Write objects, in order; the first error ends the batch. What has no reservation gets one first.

        What another process has stored meanwhile is left as it is, and what finds the disk full is rejected.

        Args:
            used: gets the reservations that have become objects; the others are still the caller's.
        """
        if not self._folder.prepare_to_write():
            return [StoreOutcome.REJECTED] * len(keys)
        held = list(reservations)
        outcomes: list[StoreOutcome | None] = [None] * len(held)
        missing = [index for index, reservation in enumerate(held) if reservation is None]
        if missing:
            room = self.reserve([keys[index] for index in missing], [len(buffers[index]) for index in missing])
            for index, reservation, outcome in zip(missing, room.reservations, room.outcomes, strict=True):
                held[index], outcomes[index] = reservation, outcome
        written: list[tuple[int, ObjectKey]] = []
        try:
            for index, (key, buffer, reservation) in enumerate(zip(keys, buffers, held, strict=True)):
                if reservation is None:
                    continue
                if self._folder.contains([key]) == [True]:
                    outcomes[index] = StoreOutcome.ALREADY_PRESENT
                    continue
                outcomes[index] = outcome = self._folder.store(key, buffer)
                if outcome is StoreOutcome.STORED:
                    written.append((reservation, key))
        finally:
            done = {reservation for reservation, _ in written}
            own = (held[index] for index in missing)
            unused = [one for one in own if one is not None and one not in done]
            self._account.settle([key for _, key in written], [*done, *unused])
            used |= done
        return [outcome for outcome in outcomes if outcome is not None]

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Remove objects; absent ones are no error."""
        self._reopen()
        self._account.remove(keys)

    def _reserve(self, wanted: Sequence[tuple[ObjectKey, int]]) -> tuple[list[int | None], list[ObjectKey]]:
        try:
            self._reopen()
        except OSError as error:
            if error.errno not in FULL:
                raise
            return [None] * len(wanted), []
        return self._account.reserve(wanted) if wanted else ([], [])

    def _reopen(self) -> None:
        """Open an account that could not be opened: the disk may have been full or read-only.

        Raises:
            OSError: it still cannot.
        """
        if self._closed_by is not None:
            if time.monotonic() < self._next_try_seconds:
                raise self._closed_by
            self._open_account()

    def _open_account(self) -> None:
        try:
            self._account.open()
            self._account.settle_the_dead()
        except OSError as error:
            self._account.close()
            self._closed_by = error
            self._next_try_seconds = time.monotonic() + _TRY_AGAIN_SECONDS
            raise
        self._closed_by = None
