"""What a tier with a capacity does around its folder: it keeps the folder's account. Blocks, on any thread."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from offload_backend_disk import files
from offload_backend_disk.account import Account
from offload_backend_disk.folder import ObjectFolder
from offload_core.backend import StoreOutcome
from offload_core.keys import ObjectKey


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
        self._read_only: OSError | None = None

    def open(self) -> list[Path]:
        """Open the account, and settle what processes that were killed have left.

        Returns:
            Folders that the account does not know, or not for certain: :meth:`scan` them, in any time.

        Raises:
            OSError: the folder cannot even be read. One that cannot be written can still be loaded from.
        """
        try:
            self._account.open()
            self._account.settle_the_dead()
            if not self._account.needs_scan():
                return []
            folders = self._folder.folders()
            if not folders:
                self._account.scan_ends()
        except OSError as error:
            if not os.access(self._folder.layout.root, os.R_OK | os.X_OK):
                raise
            self._read_only = error
            return []
        return folders

    def close(self) -> None:
        """Let go of the account. Idempotent."""
        self._account.close()

    def scan(self, folder: Path, *, last: bool) -> None:
        """Take a folder into the account."""
        self._account.scan_folder(folder)
        if last:
            self._account.scan_ends()

    def pin(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Keep objects until :meth:`unpin`: this process does not evict them, and what others evict stays readable.

        Returns:
            Per key an open descriptor of its file, or ``None`` where there is none.
        """
        descriptors: list[int | None] = []
        try:
            for key in keys:
                descriptors.append(files.open_to_read(self._folder.layout.path(key)))
        except BaseException:
            _close_all(descriptors)
            raise
        if self._read_only is None:
            present = [key for key, descriptor in zip(keys, descriptors, strict=True) if descriptor is not None]
            self._account.touch(present)
            self._account.pin(present)
        return descriptors

    def unpin(self, keys: Sequence[ObjectKey], descriptors: Sequence[int | None]) -> None:
        """Undo :meth:`pin`."""
        if self._read_only is None:
            self._account.unpin([key for key, one in zip(keys, descriptors, strict=True) if one is not None])
        _close_all(descriptors)

    def reserve(self, keys: Sequence[ObjectKey], nbytes: Sequence[int]) -> Room:
        """Reserve room for what is not there yet, evicting what was used longest ago."""
        account = self._writable()
        present = self._folder.contains(keys)
        account.touch([key for key, there in zip(keys, present, strict=True) if there])
        wanted = [(key, size) for key, size, there in zip(keys, nbytes, present, strict=True) if not there]
        granted, evicted = account.reserve(wanted) if wanted else ([], [])
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

        Args:
            used: gets the reservations that have become objects; the others are still the caller's.
        """
        account = self._writable()
        held = list(reservations)
        outcomes: list[StoreOutcome | None] = [None] * len(held)
        missing = [index for index, reservation in enumerate(held) if reservation is None]
        if missing:
            room = self.reserve([keys[index] for index in missing], [len(buffers[index]) for index in missing])
            for index, reservation, outcome in zip(missing, room.reservations, room.outcomes, strict=True):
                held[index], outcomes[index] = reservation, outcome
        written: list[tuple[int, ObjectKey, int]] = []
        try:
            for index, (key, buffer, reservation) in enumerate(zip(keys, buffers, held, strict=True)):
                if reservation is not None:
                    self._folder.store(key, buffer)
                    written.append((reservation, key, len(buffer)))
                    outcomes[index] = StoreOutcome.STORED
        finally:
            done = {reservation for reservation, _, _ in written}
            own = (held[index] for index in missing)
            account.settle(written, [one for one in own if one is not None and one not in done])
            used |= done
        return [outcome for outcome in outcomes if outcome is not None]

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Remove objects; absent ones are no error."""
        self._writable().remove(keys)

    def _writable(self) -> Account:
        if self._read_only is not None:
            raise self._read_only
        return self._account


def _close_all(descriptors: Sequence[int | None]) -> None:
    for descriptor in descriptors:
        if descriptor is not None:
            os.close(descriptor)
