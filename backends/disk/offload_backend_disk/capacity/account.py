"""The account of a folder of objects: who may write how much, what was used when, and so what goes first.

One SQLite database in the folder, shared by all processes on the host. Every byte is reserved in it before it is
written, so the account is never behind what is on the disk; what a killed process had reserved is settled by those that
live on. Files are removed within a transaction only, so that what it finds on the disk is so until it ends.

Everything here blocks; calls may come from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from offload_backend_disk.capacity.database import FULL, Database
from offload_backend_disk.capacity.eviction import Evictor, Limits
from offload_backend_disk.capacity.pins import Pins
from offload_backend_disk.capacity.processes import Owners
from offload_backend_disk.capacity.rows import PackNames, Records
from offload_backend_disk.capacity.write_behind import Notes
from offload_backend_disk.folder.layout import Layout, hash_range
from offload_backend_disk.folder.mount_guard import Home
from offload_core.api import ObjectKey


class Account:
    """The account of one folder, as one process sees it.

    Args:
        home: the folder.
        owners: this process's lock in it; reservations are made in its name.
        limits: how much may be in the folder.
    """

    def __init__(self, home: Home, owners: Owners, limits: Limits) -> None:
        self._home = home
        self._layout = Layout(home.root)
        self._owners = owners
        self._database = Database(owners.folder / "account.sqlite")
        self._pins = Pins(owners.folder / "pins")
        self._evictor = Evictor(self._layout, self._pins, limits, home.free_bytes)
        self._lock = threading.Lock()  # around everything that uses the database
        self._packs = PackNames()
        self._notes = Notes()
        self._opened = False
        self._reopened = False
        self._known = False

    def open(self) -> None:
        """Open or create the account, and take this process's lock.

        Raises:
            OSError: the folder cannot be written, is full, or is on another file system than it was.
        """
        with self._lock:
            self._opened = True
            self._open()

    def close(self) -> None:
        """Write down what was used and let go of everything. Idempotent."""
        if self._database.is_there:  # else there is nobody left to tell
            self.write_down()
        with self._lock:
            self._opened = False
            self._database.close()
            self._pins.close()
        self._owners.drop()

    def reserve(self, wanted: Sequence[tuple[ObjectKey, int]]) -> tuple[list[int | None], list[ObjectKey]]:
        """Reserve room for objects, in order, evicting what is to go first.

        Returns:
            Per object a reservation, or ``None`` where there is no room; and what was evicted.

        Raises:
            OSError: the account cannot be used. A disk that is merely full has no room.
        """
        evicted: list[ObjectKey] = []
        granted: list[int | None] = []
        if not self._known and self._lock.locked():  # nothing waits for a scan
            return [None] * len(wanted), evicted
        try:
            with self._transaction() as records:
                for key, nbytes in wanted:
                    room = self._evictor.make_room(records, nbytes)
                    if not room and self._settle_the_dead(records):
                        room = self._evictor.make_room(records, nbytes)
                    granted.append(records.reserve(self._owners.owner, key, nbytes) if room else None)
                    evicted += records.removed
                    records.removed.clear()
                self._known = self._known or records.totals().scanned
        except OSError as error:
            self._notes.lose(evicted)
            if error.errno not in FULL:
                raise
            return [None] * len(wanted), evicted
        return granted, evicted

    def settle(self, written: Iterable[ObjectKey], ended: Iterable[int]) -> None:
        """End reservations, and take up objects that are on the disk now.

        Where this cannot be written down, because the disk is full, the next transaction does it.
        """
        self._notes.settle(written, ended)
        self.write_down()

    def write_down(self) -> None:
        """Write down what was noted, if anything was. What cannot be is kept."""
        if self._notes:
            with suppress(OSError), self._transaction():
                pass

    def remove(self, keys: Iterable[ObjectKey]) -> None:
        """Remove objects from the disk and from the account.

        Raises:
            OSError: the folder cannot be written.
        """
        removed = 0
        try:
            with self._transaction() as records:
                for key in keys:
                    self._layout.unlink(key)
                    records.removed.append(key)
                    removed += 1
                records.drop(records.removed)
        except OSError as error:
            if error.errno not in FULL or not removed:
                raise

    def touch(self, keys: Iterable[ObjectKey]) -> None:
        """Note that objects were used. It is written down with the next transaction."""
        self._notes.touch(keys)

    def pin(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Keep all processes from evicting objects, until as many :meth:`unpin`; returns the sizes of those there."""
        sizes = self._pins.pin(keys, self._layout.nbytes)
        self.touch(key for key, size in zip(keys, sizes, strict=True) if size is not None)
        return sizes

    def unpin(self, keys: Iterable[ObjectKey]) -> None:
        """Undo :meth:`pin`, for the keys that it said are there."""
        self._pins.unpin(keys)

    @property
    def used_bytes(self) -> int:
        """Bytes of all objects and reservations in the folder."""
        with self._transaction() as records:
            return records.totals().used

    @property
    def has_notes(self) -> bool:
        """Whether :meth:`write_down` has anything to do."""
        return bool(self._notes)

    def take_reopened(self) -> bool:
        """Return whether the account has been opened again, because its folder had gone, since this was asked last."""
        reopened, self._reopened = self._reopened, False
        return reopened

    def settle_the_dead(self) -> None:
        """End the reservations of processes that have ended, and remove what they had begun to write."""
        with self._transaction() as records:
            self._settle_the_dead(records)

    def needs_scan(self) -> bool:
        """Return whether the account may be behind the disk: it is new, or the machine was started since.

        A new account counts as full until it has been brought in line, since nobody knows what is there.
        """
        with self._transaction() as records:
            totals = records.totals()
        self._known = totals.scanned
        return not totals.scanned or totals.boot != _boot_id()

    def scan(self, folder: Path, names: Sequence[str], after: bytes, up_to: bytes) -> None:
        """Bring the account in line with files of one of the layout's folders.

        Args:
            names: its objects whose hashes are above ``after`` and at most ``up_to``, as far as there are any.
        """
        namespace, pack = folder.parts[-3:-1]
        listed = [self._layout.key(folder, name) for name in names]
        with self._transaction() as records:  # in which nothing is removed: what is there now is there until its end
            known = records.hashes(namespace, pack, after, up_to)
            sizes = {key: size for key in listed if (size := self._size(key))}
            fresh = ((key, size) for key, size in sizes.items() if known.get(key.chunk_hash) != size[0])
            records.put((key, nbytes, used) for key, (nbytes, used) in fresh)
            there = {key.chunk_hash for key in sizes}
            missing = [ObjectKey(namespace, pack, one) for one in known if one not in there]
            records.drop(key for key in missing if self._size(key) is None)

    def scan_ends(self) -> None:
        """Note that every folder was scanned."""
        with self._transaction() as records:
            for namespace, pack, prefix in records.folders():
                if not (self._layout.root / namespace / pack / prefix).is_dir():
                    gone = records.hashes(namespace, pack, *hash_range(prefix))
                    records.drop(ObjectKey(namespace, pack, one) for one in gone)
            records.set_scanned(_boot_id())
        self._known = True

    def _size(self, key: ObjectKey) -> tuple[int, int] | None:
        """Return an object's size in bytes and when it was stored, in nanoseconds."""
        status = self._layout.status(key)
        return None if status is None else (status.st_size, status.st_mtime_ns)

    def _settle_the_dead(self, records: Records) -> bool:
        """Return whether there was anything to settle."""
        alive = {owner: self._owners.alive(owner) for owner in records.owners() if owner != self._owners.owner}
        left = [one for one in records.reservations_of_others(self._owners.owner) if not alive[one[1]]]
        for _, owner, key in left:
            self._layout.remove_debris(key, owner)
        self._put(records, ((key, self._notes.now()) for _, _, key in left))
        records.end(number for number, _, _ in left)
        return bool(left)

    def _put(self, records: Records, objects: Iterable[tuple[ObjectKey, int]]) -> None:
        """Take up objects, as far as they are there, with when they were used."""
        sizes = ((key, self._layout.nbytes(key), used) for key, used in objects)
        records.put((key, nbytes, used) for key, nbytes, used in sizes if nbytes is not None)

    @contextmanager
    def _transaction(self) -> Iterator[Records]:
        """One transaction, which starts with what is to be written down; everything in it happens or nothing.

        Raises:
            OSError: the account cannot be used.
        """
        with self._lock:
            if not self._opened:
                raise OSError(f"{self._database.path}: the account is not open")
            if not self._database.is_there:  # somebody has removed the folder, or unmounted it
                self._open()
                self._reopened = True
            notes = self._notes.take()
            removed: list[ObjectKey] = []
            try:
                with self._database.transaction() as sql:
                    records = Records(sql, self._packs)
                    removed = records.removed
                    records.end(notes.ended)
                    records.drop(key for key in notes.gone if self._layout.nbytes(key) is None)
                    self._put(records, notes.written.items())
                    self._evictor.note_use(records, notes.touched.items(), self._notes.now)
                    yield records
            except BaseException:
                self._packs.clear()
                self._notes.put_back(notes)
                self._notes.lose(removed)
                raise

    def _open(self) -> None:
        self._database.close()
        self._packs.clear()
        self._home.open()
        self._owners.take()
        with self._owners.opening():
            self._database.open()
        self._pins.open()


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
