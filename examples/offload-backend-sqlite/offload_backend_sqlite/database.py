"""Objects, pins and reservations in the database. Every call blocks, on one of the tier's threads, once per batch.

The database has three tables:

- ``objects`` has a row per object. The column ``uses`` orders the rows by their last use, for eviction.
- ``contents`` has the bytes. They are apart, so that a lookup or a use reads and rewrites no megabytes.
- ``holds`` has a row per key of a reservation. The key is not evicted meanwhile, and ``nbytes`` are reserved for it.

Since holds are in the database, pins (C9) and the limit (C11) bind all processes. The holds of a dead process are
removed.

A reader sees one state of the file from the begin to the end of its transaction (WAL mode). So a load is whole or a
miss, even if the object is replaced or evicted meanwhile (C6).
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

from offload_backend_sqlite.connections import READ, WRITE, Connections
from offload_backend_sqlite.processes import OwnProcess, remove_dead
from offload_core.api import LoadOutcome, ObjectKey, StoredObject, StoreOutcome

COPY_STEP_BYTES = 1024 * 1024  # copied at once between a buffer and SQLite's pages; no object is in memory twice
OBJECTS_PER_BATCH = 1000

NEXT_USE = "(SELECT coalesce(max(uses), 0) + 1 FROM objects)"
USED_BYTES = "SELECT (SELECT coalesce(sum(nbytes), 0) FROM objects) + (SELECT coalesce(sum(nbytes), 0) FROM holds)"
EVICTABLE = "SELECT key, nbytes FROM objects WHERE key NOT IN (SELECT key FROM holds) ORDER BY uses"
# Several calls may have reserved for one key. The smallest reservation that is enough leaves the larger ones to them.
OWN_RESERVATION = "SELECT rowid FROM holds WHERE owner = ? AND key = ? AND nbytes >= ? ORDER BY nbytes LIMIT 1"


class Database:
    """The objects in one database file.

    Every method may raise ``OSError``: the file cannot be used, or another process kept it locked for too long.
    """

    def __init__(self, path: Path, capacity_bytes: int, busy_timeout_seconds: float) -> None:
        self._path = path
        self._capacity_bytes = capacity_bytes
        self._connections = Connections(path, busy_timeout_seconds)
        self._own_process = OwnProcess(path)

    def open(self) -> None:
        """Create the file if it is missing, check its format, and register this process."""
        self._connections.create_file(f"new-{self._own_process.name}")
        with self._connections.transaction(WRITE) as db:
            self._connections.check_format(db)
            self._own_process.register()
            self._release_dead_processes(db)

    def close(self) -> None:
        """Release this process's reservations and close all connections. No other call may be running. Idempotent."""
        try:
            if self._own_process.is_registered:
                with self._connections.transaction(WRITE) as db:
                    db.execute("DELETE FROM holds WHERE owner = ?", (self._own_process.name,))
        finally:
            self._own_process.unregister()
            self._connections.close()

    def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return, per key, whether it is present."""
        with self._connections.transaction(READ) as db:
            return [_id(db, key) is not None for key in keys]

    def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        """Load every key into its buffer."""
        with self._connections.transaction(READ) as db:
            return [_load(db, key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        """Store every buffer under its key.

        Each object has a transaction of its own, so that other writers wait for one object at most.
        """
        return [self._store(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Remove objects; absent ones are no error."""
        with self._connections.transaction(WRITE) as db:
            db.executemany("DELETE FROM objects WHERE key = ?", [(key.path,) for key in keys])

    def pin(self, reservation: str, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Pin the objects that are present until ``reservation`` is released, and count a use of each.

        Returns:
            The size of each object, ``None`` if it is absent.
        """
        with self._connections.transaction(WRITE) as db:
            return [self._pin(db, reservation, key) for key in keys]

    def reserve(
        self, reservation: str, keys: Sequence[ObjectKey], nbytes: Sequence[int]
    ) -> tuple[list[StoreOutcome | None], list[ObjectKey]]:
        """Reserve capacity for the absent objects until ``reservation`` is released, and pin those present.

        Returns:
            The outcome per key, ``None`` if capacity is reserved for it; and the keys evicted for that.
        """
        outcomes: list[StoreOutcome | None] = []
        evicted: list[ObjectKey] = []
        with self._connections.transaction(WRITE) as db:
            for key, size in zip(keys, nbytes, strict=True):
                if self._pin(db, reservation, key) is not None:
                    outcomes.append(StoreOutcome.ALREADY_PRESENT)
                elif (victims := self._evict_for(db, size)) is None:
                    outcomes.append(StoreOutcome.REJECTED)
                else:
                    evicted += victims
                    self._hold(db, reservation, key, size)
                    outcomes.append(None)
        return outcomes, evicted

    def release(self, reservation: str) -> None:
        """Release all pins and the capacity of ``reservation``."""
        with self._connections.transaction(WRITE) as db:
            db.execute("DELETE FROM holds WHERE reservation = ?", (reservation,))

    def objects_after(self, path: str) -> list[StoredObject]:
        """Return the next batch of objects in the order of their keys' paths."""
        with self._connections.transaction(READ) as db:
            rows = db.execute(
                "SELECT key, nbytes, stored_at_seconds FROM objects WHERE key > ? ORDER BY key LIMIT ?",
                (path, OBJECTS_PER_BATCH),
            ).fetchall()
        return [StoredObject(ObjectKey.from_path(text), nbytes, stored_at) for text, nbytes, stored_at in rows]

    def _store(self, key: ObjectKey, buffer: memoryview) -> StoreOutcome:
        with self._connections.transaction(WRITE) as db:
            own_reservation = (self._own_process.name, key.path, len(buffer))
            db.execute(f"UPDATE holds SET nbytes = 0 WHERE rowid = ({OWN_RESERVATION})", own_reservation)  # now used
            db.execute("DELETE FROM objects WHERE key = ?", (key.path,))
            if self._evict_for(db, len(buffer)) is None:  # with a reservation it fits already
                db.rollback()
                return StoreOutcome.REJECTED
            new = db.execute(
                f"INSERT INTO objects (key, nbytes, stored_at_seconds, uses) VALUES (?, ?, ?, {NEXT_USE})",
                (key.path, len(buffer), time.time()),
            ).lastrowid
            assert new is not None, "an INSERT sets it"
            db.execute("INSERT INTO contents VALUES (?, zeroblob(?))", (new, len(buffer)))
            with db.blobopen("contents", "bytes", new) as blob:
                for start in range(0, len(buffer), COPY_STEP_BYTES):
                    blob.write(buffer[start : start + COPY_STEP_BYTES])
        return StoreOutcome.STORED

    def _hold(self, db: sqlite3.Connection, reservation: str, key: ObjectKey, nbytes: int) -> None:
        db.execute("INSERT INTO holds VALUES (?, ?, ?, ?)", (self._own_process.name, reservation, key.path, nbytes))

    def _pin(self, db: sqlite3.Connection, reservation: str, key: ObjectKey) -> int | None:
        """Pin an object and count a use of it; return its size, ``None`` if it is absent."""
        used = f"UPDATE objects SET uses = {NEXT_USE} WHERE key = ? RETURNING nbytes"
        present = db.execute(used, (key.path,)).fetchall()
        if not present:
            return None
        self._hold(db, reservation, key, 0)
        return int(present[0][0])

    def _evict_for(self, db: sqlite3.Connection, nbytes: int) -> list[ObjectKey] | None:
        """Evict objects until ``nbytes`` fit and return their keys. If they cannot fit, evict nothing: ``None``."""
        if nbytes > min(self._capacity_bytes, db.getlimit(sqlite3.SQLITE_LIMIT_LENGTH)):
            return None
        victims = self._victims(db, nbytes)
        if victims is None and self._release_dead_processes(db):
            victims = self._victims(db, nbytes)
        if victims is None:
            return None
        db.executemany("DELETE FROM objects WHERE key = ?", [(text,) for text in victims])
        return [ObjectKey.from_path(text) for text in victims]

    def _victims(self, db: sqlite3.Connection, nbytes: int) -> list[str] | None:
        """Return the objects to evict so that ``nbytes`` fit, ``None`` if too few can be."""
        missing = db.execute(USED_BYTES).fetchone()[0] + nbytes - self._capacity_bytes
        victims: list[str] = []
        candidates = db.execute(EVICTABLE)
        while missing > 0:
            candidate = candidates.fetchone()
            if candidate is None:
                return None
            victims.append(candidate[0])
            missing -= candidate[1]
        return victims

    def _release_dead_processes(self, db: sqlite3.Connection) -> bool:
        """Remove the holds of dead processes; return whether there were any.

        The caller is in a write transaction, so no other process can register meanwhile.
        """
        names = {name for (name,) in db.execute("SELECT DISTINCT owner FROM holds")}
        dead = remove_dead(self._path, names)
        db.executemany("DELETE FROM holds WHERE owner = ?", [(name,) for name in dead])
        return bool(dead)


def _id(db: sqlite3.Connection, key: ObjectKey) -> int | None:
    row = db.execute("SELECT id FROM objects WHERE key = ?", (key.path,)).fetchone()
    return None if row is None else int(row[0])


def _load(db: sqlite3.Connection, key: ObjectKey, buffer: memoryview) -> LoadOutcome:
    object_id = _id(db, key)
    if object_id is None:
        return LoadOutcome.MISS
    try:
        with db.blobopen("contents", "bytes", object_id, readonly=True) as blob:
            if len(blob) != len(buffer):
                return LoadOutcome.CORRUPT
            for start in range(0, len(buffer), COPY_STEP_BYTES):
                buffer[start : start + COPY_STEP_BYTES] = blob.read(COPY_STEP_BYTES)
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_CORRUPT:  # the low byte is the error, the rest a detail
            raise
        return LoadOutcome.CORRUPT
    return LoadOutcome.HIT
