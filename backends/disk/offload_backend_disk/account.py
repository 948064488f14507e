"""The account of a folder of objects: who may write how much, what was used when, and so what goes first.

One SQLite database in the folder, shared by all processes on the host. Every byte is reserved in it before it is
written, so the account is never behind what is on the disk; what a killed process had reserved is settled by the next
one that opens the folder. A process is alive while it holds a lock on a file of its own, which the kernel lets go of
whichever way the process ends.

Everything here blocks; calls may come from any thread.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from offload_backend_disk.layout import Layout
from offload_core.keys import ObjectKey

FOLDER_NAME = ".offload-core"
_DATABASE = "account.sqlite"
_OWNERS = "owners"

_SCHEMA_VERSION = 1
_BUSY_SECONDS = 10.0
_EVICT_AT_ONCE = 64
_SCHEMA = """
CREATE TABLE packs (id INTEGER PRIMARY KEY, namespace TEXT NOT NULL, pack TEXT NOT NULL, UNIQUE (namespace, pack));
CREATE TABLE objects (
    pack INTEGER NOT NULL, hash BLOB NOT NULL, nbytes INTEGER NOT NULL, used INTEGER NOT NULL,
    PRIMARY KEY (pack, hash)
) WITHOUT ROWID;
CREATE INDEX objects_by_use ON objects (used);
CREATE TABLE reservations (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    owner TEXT NOT NULL, pack INTEGER NOT NULL, hash BLOB NOT NULL, nbytes INTEGER NOT NULL
);
CREATE TABLE totals (nbytes INTEGER NOT NULL, scanned INTEGER NOT NULL, boot TEXT NOT NULL);
INSERT INTO totals VALUES (0, 0, '');
CREATE TRIGGER object_added AFTER INSERT ON objects BEGIN UPDATE totals SET nbytes = nbytes + NEW.nbytes; END;
CREATE TRIGGER object_gone AFTER DELETE ON objects BEGIN UPDATE totals SET nbytes = nbytes - OLD.nbytes; END;
CREATE TRIGGER room_added AFTER INSERT ON reservations BEGIN UPDATE totals SET nbytes = nbytes + NEW.nbytes; END;
CREATE TRIGGER room_gone AFTER DELETE ON reservations BEGIN UPDATE totals SET nbytes = nbytes - OLD.nbytes; END;
"""


class Account:
    """The account of one folder, as one process sees it.

    Args:
        layout: the folder; the database and the lock files lie in a folder of their own in it.
        owner: names this process's reservations and temporary files; nobody else uses the name.
        capacity_bytes: limit on all objects of the folder.
        low_watermark: an eviction goes on until no more than this part of the capacity is in use.
    """

    def __init__(self, layout: Layout, owner: str, capacity_bytes: int, low_watermark: float) -> None:
        self._layout = layout
        self._folder = layout.root / FOLDER_NAME
        self._capacity_bytes = capacity_bytes
        self._low_bytes = int(low_watermark * capacity_bytes)
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._inode = 0
        self._packs: dict[int, tuple[str, str]] = {}
        self._pack_ids: dict[tuple[str, str], int] = {}
        # To be written down with the next transaction: when objects were used, reservations that ended, new objects.
        self._touched: dict[ObjectKey, int] = {}
        self._ended: list[int] = []
        self._written: dict[ObjectKey, tuple[int, int]] = {}
        self._pinned: dict[ObjectKey, int] = {}
        self._owner = owner
        self._owner_lock = -1

    def open(self) -> None:
        """Open or create the database and take this process's lock.

        Raises:
            OSError: the folder cannot be written.
        """
        (self._folder / _OWNERS).mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / _DATABASE
        with self._opening():
            self._owner_lock = os.open(self._owner_file(self._owner), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._owner_lock, fcntl.LOCK_EX)
            try:
                self._connect(path)
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise OSError(f"{path}: {error}") from error
                for damaged in self._folder.glob(f"{_DATABASE}*"):  # rebuilt by a scan
                    damaged.unlink(missing_ok=True)
                self._connect(path)

    @contextmanager
    def _opening(self) -> Iterator[None]:
        """One process at a time: SQLite does not wait where it sets WAL up, and no owner is to be taken for dead."""
        with (self._folder / "opening").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _owner_file(self, owner: str) -> Path:
        return self._folder / _OWNERS / owner

    def _connect(self, path: Path) -> None:
        connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")  # a crash of the machine may undo the latest changes
            connection.execute("BEGIN IMMEDIATE")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in _statements(_SCHEMA):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
            connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        self._inode = path.stat().st_ino

    def close(self) -> None:
        """Write down what was used and let go of everything. Idempotent."""
        with self._lock:
            if self._connection is not None:
                with suppress(sqlite3.Error), self._transaction():
                    pass
                self._connection.close()
                self._connection = None
            if self._owner_lock >= 0:
                self._owner_file(self._owner).unlink(missing_ok=True)
                os.close(self._owner_lock)
                self._owner_lock = -1

    def reserve(self, wanted: Sequence[tuple[ObjectKey, int]]) -> tuple[list[int | None], list[ObjectKey]]:
        """Reserve room for objects, in order, evicting what was used longest ago.

        Returns:
            Per object a reservation, or ``None`` where there is no room; and what was evicted.
        """
        evicted: list[ObjectKey] = []
        granted: list[int | None] = []
        with self._transaction() as sql:
            for key, nbytes in wanted:
                room = self._make_room(sql, nbytes, evicted)
                granted.append(self._insert_reservation(sql, key, nbytes) if room else None)
        return granted, evicted

    def settle(self, written: Sequence[tuple[int, ObjectKey, int]], abandoned: Sequence[int]) -> None:
        """End reservations: of objects that are on the disk now (reservation, key, bytes), and of others."""
        now = time.time_ns()
        with self._lock:
            # On a full disk the database may not grow either. Then it stays to be written down by the next transaction.
            self._ended += [*abandoned, *(reservation for reservation, _, _ in written)]
            self._written.update((key, (nbytes, now)) for _, key, nbytes in written)
        with self._transaction():
            pass

    def remove(self, keys: Iterable[ObjectKey]) -> None:
        """Remove objects from the disk and from the account."""
        with self._transaction() as sql:
            for key in keys:
                self._layout.unlink(key)
                self._delete_object(sql, key)

    def touch(self, keys: Iterable[ObjectKey]) -> None:
        """Note that objects were used. It is written down with the next transaction."""
        now = time.time_ns()
        with self._lock:
            self._touched.update(dict.fromkeys(keys, now))

    def pin(self, keys: Iterable[ObjectKey]) -> None:
        """Keep this process from evicting objects, until as many :meth:`unpin`."""
        with self._lock:
            for key in keys:
                self._pinned[key] = self._pinned.get(key, 0) + 1

    def unpin(self, keys: Iterable[ObjectKey]) -> None:
        """Undo :meth:`pin`."""
        with self._lock:
            for key in keys:
                self._pinned[key] -= 1
                if not self._pinned[key]:
                    del self._pinned[key]

    @property
    def used_bytes(self) -> int:
        """Bytes of all objects and reservations in the folder."""
        with self._transaction() as sql:
            return int(sql.execute("SELECT nbytes FROM totals").fetchone()[0])

    def settle_the_dead(self) -> None:
        """End the reservations of processes that have ended, and remove what they had begun to write."""
        with self._opening(), self._transaction() as sql:
            self._settle_the_dead(sql)
            for path in (self._folder / _OWNERS).iterdir():
                if path.name != self._owner and not self._alive(path.name):
                    path.unlink(missing_ok=True)

    def needs_scan(self) -> bool:
        """Return whether the account may be behind the disk: new, or a process was killed or the machine started since.

        A new account counts as full until it has been brought in line, since nobody knows what is there.
        """
        with self._transaction() as sql:
            scanned, boot = sql.execute("SELECT scanned, boot FROM totals").fetchone()
            return not scanned or boot != _boot_id()

    def scan_folder(self, folder: Path) -> None:
        """Bring the account in line with one of the layout's folders."""
        with self._transaction() as sql:
            self._scan(sql, folder)

    def scan_ends(self) -> None:
        """Note that every folder was scanned."""
        with self._transaction() as sql:
            self._drop_vanished_folders(sql)
            sql.execute("UPDATE totals SET scanned = 1, boot = ?", (_boot_id(),))

    def _make_room(self, sql: sqlite3.Connection, nbytes: int, evicted: list[ObjectKey]) -> bool:
        total, scanned = sql.execute("SELECT nbytes, scanned FROM totals").fetchone()
        if total + nbytes <= self._capacity_bytes:
            return bool(scanned)
        if not scanned:
            return False
        (reserved,) = sql.execute("SELECT coalesce(sum(nbytes), 0) FROM reservations").fetchone()
        pinned = sum(self._object_bytes(sql, key) for key in self._pinned)
        if reserved + pinned + nbytes > self._capacity_bytes:
            return self._settle_the_dead(sql) and self._make_room(sql, nbytes, evicted)
        target = max(min(self._low_bytes, self._capacity_bytes - nbytes), reserved + pinned)
        while total + nbytes > self._capacity_bytes or total > target:
            victims = self._oldest(sql, total - target)
            if not victims:
                break
            for key, size in victims:
                self._layout.unlink(key)
                self._delete_object(sql, key)
                evicted.append(key)
                total -= size
        return bool(total + nbytes <= self._capacity_bytes)

    def _oldest(self, sql: sqlite3.Connection, nbytes: int) -> list[tuple[ObjectKey, int]]:
        """Return objects that were used longest ago, of at least ``nbytes`` bytes in all, or fewer."""
        rows = sql.execute("SELECT pack, hash, nbytes FROM objects ORDER BY used")
        found: list[tuple[ObjectKey, int]] = []
        for pack, chunk_hash, size in rows:
            key = ObjectKey(*self._pack_name(sql, pack), chunk_hash)
            if key not in self._pinned:
                found.append((key, size))
                nbytes -= size
            if nbytes <= 0 or len(found) == _EVICT_AT_ONCE:
                break
        return found

    def _settle_the_dead(self, sql: sqlite3.Connection) -> bool:
        """Return whether there was anything to settle."""
        owners = {owner for (owner,) in sql.execute("SELECT DISTINCT owner FROM reservations")}
        dead = [owner for owner in owners if owner != self._owner and not self._alive(owner)]
        for owner in dead:
            rows = sql.execute("SELECT pack, hash FROM reservations WHERE owner = ?", (owner,)).fetchall()
            for pack, chunk_hash in rows:
                key = ObjectKey(*self._pack_name(sql, pack), chunk_hash)
                self._layout.remove_debris(key, owner)
                nbytes = self._layout.nbytes(key)
                if nbytes is not None:
                    self._insert_object(sql, key, nbytes, time.time_ns())
            sql.execute("DELETE FROM reservations WHERE owner = ?", (owner,))
            sql.execute("UPDATE totals SET boot = ''")  # it may have removed files without getting to write that down
            self._owner_file(owner).unlink(missing_ok=True)
        return bool(dead)

    def _alive(self, owner: str) -> bool:
        try:
            descriptor = os.open(self._owner_file(owner), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def _scan(self, sql: sqlite3.Connection, folder: Path) -> None:
        namespace, pack, prefix = folder.parts[-3:]
        pack_id = self._pack_id(sql, ObjectKey(namespace, pack, b""))
        low, high = bytes.fromhex(prefix), bytes.fromhex(prefix) + b"\xff" * 64
        asked = (pack_id, low, high)
        known = dict(sql.execute("SELECT hash, nbytes FROM objects WHERE pack = ? AND hash BETWEEN ? AND ?", asked))
        for found in self._layout.objects_in(folder):
            if known.pop(found.key.chunk_hash, None) != found.nbytes:
                self._insert_object(sql, found.key, found.nbytes, int(found.stored_at_seconds * 1e9))
        for chunk_hash in known:
            self._delete_object(sql, ObjectKey(namespace, pack, chunk_hash))

    def _drop_vanished_folders(self, sql: sqlite3.Connection) -> None:
        for pack, namespace, name in sql.execute("SELECT id, namespace, pack FROM packs").fetchall():
            folder = self._layout.root / namespace / name
            prefixes = sql.execute("SELECT DISTINCT hex(substr(hash, 1, 1)) FROM objects WHERE pack = ?", (pack,))
            for (prefix,) in prefixes.fetchall():
                if not (folder / prefix.lower()).is_dir():
                    low = bytes.fromhex(prefix)
                    gone = (pack, low, low + b"\xff" * 64)
                    sql.execute("DELETE FROM objects WHERE pack = ? AND hash BETWEEN ? AND ?", gone)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """One transaction, which starts with what is to be written down; everything in it happens or nothing."""
        with self._lock:
            if self._connection is None:
                raise OSError(f"{self._folder}: the account is not open")
            self._follow_the_folder()
            sql = self._connection
            try:
                sql.execute("BEGIN IMMEDIATE")
                try:
                    self._write_down(sql)
                    yield sql
                    sql.execute("COMMIT")
                    self._touched.clear()
                    self._ended.clear()
                    self._written.clear()
                finally:
                    if sql.in_transaction:
                        sql.execute("ROLLBACK")
                        self._pack_ids.clear()  # some may have been inserted in vain
                        self._packs.clear()
            except sqlite3.Error as error:
                raise OSError(f"{self._folder / _DATABASE}: {error}") from error

    def _write_down(self, sql: sqlite3.Connection) -> None:
        """Note what has happened since the last transaction."""
        sql.executemany("DELETE FROM reservations WHERE id = ?", [(one,) for one in self._ended])
        for key, (nbytes, used) in self._written.items():
            self._insert_object(sql, key, nbytes, used)
        rows = [(used, self._pack_id(sql, key), key.chunk_hash) for key, used in self._touched.items()]
        sql.executemany("UPDATE objects SET used = ? WHERE pack = ? AND hash = ?", rows)

    def _follow_the_folder(self) -> None:
        """Begin a new account where somebody has removed the folder with the old one."""
        try:
            if (self._folder / _DATABASE).stat().st_ino == self._inode:
                return
        except FileNotFoundError:
            pass
        self.close()
        self.open()

    def _pack_id(self, sql: sqlite3.Connection, key: ObjectKey) -> int:
        name = (key.namespace, key.pack)
        if name not in self._pack_ids:
            sql.execute("INSERT OR IGNORE INTO packs (namespace, pack) VALUES (?, ?)", name)
            row = sql.execute("SELECT id FROM packs WHERE namespace = ? AND pack = ?", name).fetchone()
            self._pack_ids[name] = row[0]
        return self._pack_ids[name]

    def _pack_name(self, sql: sqlite3.Connection, pack: int) -> tuple[str, str]:
        if pack not in self._packs:
            row = sql.execute("SELECT namespace, pack FROM packs WHERE id = ?", (pack,)).fetchone()
            self._packs[pack] = (row[0], row[1])
        return self._packs[pack]

    def _insert_reservation(self, sql: sqlite3.Connection, key: ObjectKey, nbytes: int) -> int:
        row = (self._owner, self._pack_id(sql, key), key.chunk_hash, nbytes)
        inserted = sql.execute("INSERT INTO reservations (owner, pack, hash, nbytes) VALUES (?, ?, ?, ?)", row)
        assert inserted.lastrowid is not None
        return inserted.lastrowid

    def _insert_object(self, sql: sqlite3.Connection, key: ObjectKey, nbytes: int, used: int) -> None:
        self._delete_object(sql, key)  # REPLACE would not run the trigger
        row = (self._pack_id(sql, key), key.chunk_hash, nbytes, used)
        sql.execute("INSERT INTO objects (pack, hash, nbytes, used) VALUES (?, ?, ?, ?)", row)

    def _delete_object(self, sql: sqlite3.Connection, key: ObjectKey) -> None:
        sql.execute("DELETE FROM objects WHERE pack = ? AND hash = ?", (self._pack_id(sql, key), key.chunk_hash))

    def _object_bytes(self, sql: sqlite3.Connection, key: ObjectKey) -> int:
        asked = (self._pack_id(sql, key), key.chunk_hash)
        row = sql.execute("SELECT nbytes FROM objects WHERE pack = ? AND hash = ?", asked).fetchone()
        return int(row[0]) if row else 0


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _statements(script: str) -> Iterator[str]:
    """Split a script, which sqlite3 itself would only run in a transaction of its own."""
    statement = ""
    for line in script.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
