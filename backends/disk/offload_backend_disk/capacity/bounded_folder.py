"""A folder of objects that never exceeds its capacity. Everything here blocks, on any thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from offload_backend_disk.capacity.account import Account, segment_of
from offload_backend_disk.capacity.held_reservations import HeldReservation
from offload_backend_disk.folder.control_files import LOCK_SECONDS
from offload_backend_disk.folder.files import DISK_FULL_ERRNOS
from offload_backend_disk.folder.object_folder import ObjectFolder
from offload_core.api import LoadCheck, LoadOutcome, ObjectKey, StoreOutcome, StoreSeal

_RETRY_SECONDS = 1.0
_RETRY_WAIT_SECONDS = 0.05


class ReservedCapacity(NamedTuple):
    """The answer to a request for capacity.

    Args:
        reservations: the number of the reservation per key, or ``None``.
        outcomes: the reason per key without a reservation; ``None`` for the others.
        evicted: the keys that were evicted for it.
    """

    reservations: list[int | None]
    outcomes: list[StoreOutcome | None]
    evicted: list[ObjectKey]


class BoundedFolder:
    """A folder under one limit for all its processes, which its account keeps."""

    def __init__(self, folder: ObjectFolder, account: Account) -> None:
        self._folder = folder
        self._account = account
        self._open_error: OSError | None = None
        self._next_try_seconds = 0.0
        self._retrying = threading.Lock()

    def open(self) -> None:
        """Open the account, and release the reservations of processes that were killed.

        A folder that cannot be written is no error: its objects can be loaded.

        Raises:
            OSError: the folder cannot even be read.
        """
        try:
            self._open_account()
        except OSError:
            if not os.access(self._folder.layout.root, os.R_OK | os.X_OK):
                raise

    def is_usable(self) -> bool:
        """Return whether the account can be used. If it could not be opened before, try again."""
        try:
            self._retry_open()
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the account. Idempotent."""
        self._account.close()

    def pin(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Pin the objects that are present: no process evicts one until :meth:`unpin` was called as often.

        Returns:
            The size of each object, ``None`` if it is absent.
        """
        if self._open_error is not None:
            return self._folder.sizes(keys)
        sizes = self._account.pin(keys)
        if None in sizes:
            try:
                self._folder.check()
            except OSError:
                self.unpin([key for key, size in zip(keys, sizes, strict=True) if size is not None])
                raise
        return sizes

    def unpin(self, keys: Sequence[ObjectKey]) -> None:
        """Undo :meth:`pin` for the keys that it found present."""
        self._account.unpin(keys)

    def load_and_check(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], checks: Sequence[LoadCheck]
    ) -> list[LoadOutcome]:
        """Read objects that are pinned meanwhile, and check them on the way."""
        sizes = self.pin(keys)
        try:
            loads = [
                partial(self._folder.load_one, key, buffer, check) if size is not None else lambda: LoadOutcome.MISS
                for key, buffer, check, size in zip(keys, buffers, checks, sizes, strict=True)
            ]
            outcomes = self._folder.load_each(keys, loads)
            if LoadOutcome.MISS in outcomes:
                self._folder.check()
            return outcomes
        finally:
            self.unpin([key for key, size in zip(keys, sizes, strict=True) if size is not None])

    def touch(self, keys: Sequence[ObjectKey], spare: Sequence[bool]) -> None:
        """Make objects the most recently used ones, in this order; see :meth:`Backend.touch`. Does not block."""
        self._account.touch(keys, spare)

    def reserve(self, keys: Sequence[ObjectKey], nbytes: Sequence[int], spare: Sequence[bool] = ()) -> ReservedCapacity:
        """Reserve capacity for the objects that are absent; others are evicted for it, but for spare objects none.

        If an object is present, this is a use of it. A spare object that is present stays as it is.
        """
        present = self._folder.contains(keys)
        flags = spare or [False] * len(keys)
        wanted = [(key, size) for key, size, there in zip(keys, nbytes, present, strict=True) if not there]
        granted, evicted = self._reserve(
            wanted, [flag for flag, there in zip(flags, present, strict=True) if not there]
        )
        offered_again = zip(keys, flags, present, strict=True)
        self._account.record_use([key for key, is_spare, there in offered_again if there and not is_spare])
        rest = iter(granted)
        reservations = [None if there else next(rest) for there in present]
        gone = set(evicted)  # perhaps some of this batch (C5)
        outcomes: list[StoreOutcome | None] = [StoreOutcome.REJECTED] * len(keys)
        for index, (key, there, reservation) in enumerate(zip(keys, present, reservations, strict=True)):
            if reservation is not None:
                outcomes[index] = None
            elif there and key not in gone:
                outcomes[index] = StoreOutcome.ALREADY_PRESENT
        return ReservedCapacity(reservations, outcomes, evicted)

    def release(self, reservations: Sequence[int]) -> None:
        """Release reservations that were not used."""
        self._account.release(reservations)

    def store(
        self,
        keys: Sequence[ObjectKey],
        buffers: Sequence[memoryview],
        seals: Sequence[StoreSeal | None],
        reservations: Sequence[HeldReservation | None],
        used: set[int],
    ) -> list[StoreOutcome]:
        """Write objects, in order; the first error ends the batch.

        An object without a reservation gets one first. If another process has stored an object meanwhile, it is left
        as it is. If the disk is full, the object is rejected.

        Args:
            seals: seal the buffers meanwhile; ``None`` for a sealed one.
            used: receives the reservations that have become objects; the others remain the caller's.
        """
        if not self._folder.prepare_to_write():
            return [StoreOutcome.REJECTED] * len(keys)
        held = list(reservations)
        outcomes: list[StoreOutcome | None] = [None] * len(held)
        missing = [index for index, reservation in enumerate(held) if reservation is None]
        if missing:
            reserved = self.reserve([keys[index] for index in missing], [len(buffers[index]) for index in missing])
            for index, number, outcome in zip(missing, reserved.reservations, reserved.outcomes, strict=True):
                held[index] = None if number is None else HeldReservation(number, len(buffers[index]))
                outcomes[index] = outcome
        written: list[tuple[HeldReservation, ObjectKey]] = []
        try:
            for index, (key, reservation) in enumerate(zip(keys, held, strict=True)):
                if reservation is None:
                    continue
                if self._folder.has(key):
                    outcomes[index] = StoreOutcome.ALREADY_PRESENT
                    if not reservation.is_spare:  # another call may just have stored it as spare
                        self.touch([key], [False])
                    continue
                try:
                    outcomes[index] = outcome = self._folder.store(key, buffers[index], seals[index])
                except OSError:
                    if self._may_exist(key):  # it has its name, only not yet for sure after a crash
                        written.append((reservation, key))
                    raise
                if outcome is StoreOutcome.STORED:
                    written.append((reservation, key))
        finally:
            done = {reservation.number for reservation, _ in written}
            own = (held[index] for index in missing)
            unused = [one.number for one in own if one is not None and one.number not in done]
            stored = [(key, segment_of(reservation.is_spare)) for reservation, key in written]
            self._account.release([*done, *unused], stored)
            used |= done
        return [outcome for outcome in outcomes if outcome is not None]

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Remove objects; absent ones are no error."""
        try:
            self._retry_open()
        except TimeoutError:
            self._account.remove_at_once(keys)
        else:
            self._account.remove(keys)

    def _may_exist(self, key: ObjectKey) -> bool:
        with suppress(OSError):
            return self._folder.has(key)
        return True

    def _reserve(
        self, wanted: Sequence[tuple[ObjectKey, int]], spare: Sequence[bool]
    ) -> tuple[list[int | None], list[ObjectKey]]:
        try:
            self._retry_open()
        except OSError as error:
            if not isinstance(error, TimeoutError) and error.errno not in DISK_FULL_ERRNOS:
                raise
            return [None] * len(wanted), []
        return self._account.reserve(wanted, spare) if wanted else ([], [])

    def _retry_open(self) -> None:
        """Open the account if that failed before: the disk may have been full or read-only.

        Raises:
            OSError: it failed again, or failed less than a second ago, or another thread tries it now.
        """
        error = self._open_error
        if error is None:
            return
        if time.monotonic() < self._next_try_seconds or not self._retrying.acquire(blocking=False):
            raise error
        try:
            if self._open_error is not None:
                self._open_account(_RETRY_WAIT_SECONDS if isinstance(error, TimeoutError) else LOCK_SECONDS)
        finally:
            self._retrying.release()

    def _open_account(self, wait_seconds: float = LOCK_SECONDS) -> None:
        try:
            self._account.open(wait_seconds)
            self._account.release_dead_reservations()
        except OSError as error:
            self._account.close()
            self._open_error = error
            self._next_try_seconds = time.monotonic() + _RETRY_SECONDS
            raise
        self._open_error = None
