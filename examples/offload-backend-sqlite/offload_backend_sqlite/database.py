"""Blocking work on the database file; each call runs on one of the tier's threads, one hop per batch.

Three tables. ``objects`` says what is there, with a counter of uses for eviction. ``contents`` has the bytes, apart, so
that looking at an object or counting a use reads and rewrites no megabytes. ``holds`` has a row for each key that
somebody works with: the key is not evicted meanwhile, and ``nbytes`` of room are promised to it. Since holds lie in
the database, pins (C9) and the limit (C11) hold between processes; those of a process that died are removed.

A reader sees one state of the file from the begin to the end of its transaction (WAL mode), whatever is written,
replaced or evicted meanwhile: a load is whole or a miss (C6).
"""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from offload_backend_sqlite.owners import FILE_MODE, Owner, remove_dead
from offload_core.api import LoadOutcome, ObjectKey, StoredObject, StoreOutcome

FORMAT = 0x6B7631  # "kv1"; a database of anything else, or of another version, is left alone
STEP_BYTES = 1024 * 1024  # copied at once between a buffer and SQLite's pages; no object is in memory twice
LISTED_AT_ONCE = 1000

READ = "BEGIN"
WRITE = "BEGIN IMMEDIATE"  # a reader that turned into a writer half-way would not wait for its turn but fail

SCHEMA = (
    "PRAGMA page_size = 32768",  # an object is a chain of pages; at SQLite's 4096 a store takes twice as long
    "PRAGMA journal_mode = WAL",
    f"PRAGMA application_id = {FORMAT}",
    "CREATE TABLE objects (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, nbytes INTEGER NOT NULL,"
    " stored_at_seconds REAL NOT NULL, uses INTEGER NOT NULL)",
    "CREATE INDEX objects_by_use ON objects (uses, nbytes)",
    "CREATE TABLE contents (id INTEGER PRIMARY KEY REFERENCES objects ON DELETE CASCADE, bytes BLOB NOT NULL)",
    "CREATE TABLE holds (owner TEXT NOT NULL, reservation TEXT NOT NULL, key TEXT NOT NULL, nbytes INTEGER NOT NULL)",
)
CONNECTION = (
    "PRAGMA synchronous = NORMAL",  # a power cut may lose the last stores, never half an object
    "PRAGMA foreign_keys = ON",  # what leaves objects leaves contents
)
NEXT_USE = "(SELECT coalesce(max(uses), 0) + 1 FROM objects)"
TAKEN = "SELECT (SELECT coalesce(sum(nbytes), 0) FROM objects) + (SELECT coalesce(sum(nbytes), 0) FROM holds)"
EVICTABLE = "SELECT key, nbytes FROM objects WHERE key NOT IN (SELECT key FROM holds) ORDER BY uses"
# The smallest that is enough: several calls may hold room for one key, and one must not take what another needs.
OWN_ROOM = "SELECT rowid FROM holds WHERE owner = ? AND key = ? AND nbytes >= ? ORDER BY nbytes LIMIT 1"


class Database:
    """The file and its connections, of which a thread has one for the time of a transaction.

    Every method may raise ``OSError``: the file cannot be used, or others kept it locked for too long.
    """

    def __init__(self, path: Path, capacity_bytes: int, busy_timeout_seconds: float) -> None:
        self._path = path
        self._capacity_bytes = capacity_bytes
        self._busy_timeout_seconds = busy_timeout_seconds
        self._owner = Owner(path)
        self._idle: list[sqlite3.Connection] = []

    def open(self) -> None:
        """Create the file and its tables where they are missing."""
        if not self._path.exists():
            self._create()
        with self._transaction(WRITE) as db:
            if db.execute("PRAGMA application_id").fetchone() != (FORMAT,):
                raise OSError(errno.EINVAL, "not a database of this version of this backend", str(self._path))
            self._owner.enter()
            self._forget_dead_owners(db)

    def close(self) -> None:
        """Give back what is held and close all connections. Nothing else may be running. Idempotent."""
        try:
            if self._owner.entered:
                with self._transaction(WRITE) as db:
                    db.execute("DELETE FROM holds WHERE owner = ?", (self._owner.name,))
        finally:
            self._owner.leave()
            while self._idle:
                self._idle.pop().close()

    def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return, per key, whether it is there."""
        with self._transaction(READ) as db:
            return [_id(db, key) is not None for key in keys]

    def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        """Load every key into its buffer."""
        with self._transaction(READ) as db:
            return [_load(db, key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        """Store every buffer under its key, each in a transaction of its own: other writers wait for one at most."""
        return [self._store(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Remove objects; absent ones are no error."""
        with self._transaction(WRITE) as db:
            db.executemany("DELETE FROM objects WHERE key = ?", [(key.path,) for key in keys])

    def pin(self, reservation: str, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Hold what is there until ``reservation`` is released, and count a use of it; returns its size."""
        with self._transaction(WRITE) as db:
            return [self._hold_present(db, reservation, key) for key in keys]

    def make_room(
        self, reservation: str, keys: Sequence[ObjectKey], nbytes: Sequence[int]
    ) -> tuple[list[StoreOutcome | None], list[ObjectKey]]:
        """Hold every key until ``reservation`` is released, with room for what is not there.

        Returns the outcomes, ``None`` where room is held, and what was evicted for them.
        """
        outcomes: list[StoreOutcome | None] = []
        evicted: list[ObjectKey] = []
        with self._transaction(WRITE) as db:
            for key, size in zip(keys, nbytes, strict=True):
                if self._hold_present(db, reservation, key) is not None:
                    outcomes.append(StoreOutcome.ALREADY_PRESENT)
                elif (victims := self._evict_for(db, size)) is None:
                    outcomes.append(StoreOutcome.REJECTED)
                else:
                    evicted += victims
                    self._hold(db, reservation, key, size)
                    outcomes.append(None)
        return outcomes, evicted

    def release(self, reservation: str) -> None:
        """End the holds of ``reservation``."""
        with self._transaction(WRITE) as db:
            db.execute("DELETE FROM holds WHERE reservation = ?", (reservation,))

    def objects_after(self, path: str) -> list[StoredObject]:
        """Return the next objects in the order of their keys' paths."""
        with self._transaction(READ) as db:
            rows = db.execute(
                "SELECT key, nbytes, stored_at_seconds FROM objects WHERE key > ? ORDER BY key LIMIT ?",
                (path, LISTED_AT_ONCE),
            ).fetchall()
        return [StoredObject(_key(text), nbytes, stored_at) for text, nbytes, stored_at in rows]

    def _create(self) -> None:
        """Make the file under another name first: it must not be opened before it is in WAL mode, and 0600."""
        new = self._path.with_name(f"new-{self._owner.name}")
        os.mknod(new, FILE_MODE)  # SQLite gives the same mode to the files -wal and -shm
        try:
            with _sqlite_errors_as_os_errors(new):
                _connect(new, self._busy_timeout_seconds, SCHEMA).close()
            with suppress(FileExistsError):  # another process was faster
                os.link(new, self._path)
        finally:
            new.unlink()

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        """Give a connection for one transaction, which is committed at the end, or rolled back after an error."""
        with _sqlite_errors_as_os_errors(self._path):
            try:
                db = self._idle.pop()
            except IndexError:
                db = _connect(self._path, self._busy_timeout_seconds, CONNECTION)
            try:
                with db:
                    db.execute(begin)
                    yield db
            except BaseException:
                db.close()
                raise
            self._idle.append(db)

    def _store(self, key: ObjectKey, buffer: memoryview) -> StoreOutcome:
        with self._transaction(WRITE) as db:
            own_room = (self._owner.name, key.path, len(buffer))
            db.execute(f"UPDATE holds SET nbytes = 0 WHERE rowid = ({OWN_ROOM})", own_room)  # it is used now
            db.execute("DELETE FROM objects WHERE key = ?", (key.path,))
            if self._evict_for(db, len(buffer)) is None:  # nothing to do where room was held
                db.rollback()
                return StoreOutcome.REJECTED
            new = db.execute(
                f"INSERT INTO objects (key, nbytes, stored_at_seconds, uses) VALUES (?, ?, ?, {NEXT_USE})",
                (key.path, len(buffer), time.time()),
            ).lastrowid
            assert new is not None  # it is after an INSERT
            db.execute("INSERT INTO contents VALUES (?, zeroblob(?))", (new, len(buffer)))
            with db.blobopen("contents", "bytes", new) as blob:
                for start in range(0, len(buffer), STEP_BYTES):
                    blob.write(buffer[start : start + STEP_BYTES])
        return StoreOutcome.STORED

    def _hold(self, db: sqlite3.Connection, reservation: str, key: ObjectKey, nbytes: int) -> None:
        db.execute("INSERT INTO holds VALUES (?, ?, ?, ?)", (self._owner.name, reservation, key.path, nbytes))

    def _hold_present(self, db: sqlite3.Connection, reservation: str, key: ObjectKey) -> int | None:
        used = f"UPDATE objects SET uses = {NEXT_USE} WHERE key = ? RETURNING nbytes"
        present = db.execute(used, (key.path,)).fetchall()
        if not present:
            return None
        self._hold(db, reservation, key, 0)
        return int(present[0][0])

    def _evict_for(self, db: sqlite3.Connection, nbytes: int) -> list[ObjectKey] | None:
        """Evict until ``nbytes`` fit and return what was evicted; ``None``, and nothing evicted, where they cannot."""
        if nbytes > min(self._capacity_bytes, db.getlimit(sqlite3.SQLITE_LIMIT_LENGTH)):
            return None
        victims = self._victims(db, nbytes)
        if victims is None and self._forget_dead_owners(db):
            victims = self._victims(db, nbytes)
        if victims is None:
            return None
        db.executemany("DELETE FROM objects WHERE key = ?", [(text,) for text in victims])
        return [_key(text) for text in victims]

    def _victims(self, db: sqlite3.Connection, nbytes: int) -> list[str] | None:
        missing = db.execute(TAKEN).fetchone()[0] + nbytes - self._capacity_bytes
        victims: list[str] = []
        candidates = db.execute(EVICTABLE)
        while missing > 0:
            candidate = candidates.fetchone()
            if candidate is None:
                return None
            victims.append(candidate[0])
            missing -= candidate[1]
        return victims

    def _forget_dead_owners(self, db: sqlite3.Connection) -> bool:
        """Remove the holds of processes that are gone; only one writes at a time, so none enters meanwhile."""
        names = {name for (name,) in db.execute("SELECT DISTINCT owner FROM holds")}
        dead = remove_dead(self._path, names)
        db.executemany("DELETE FROM holds WHERE owner = ?", [(name,) for name in dead])
        return bool(dead)


@contextmanager
def _sqlite_errors_as_os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise OSError(errno.EIO, f"SQLite: {error}", str(path)) from error


def _connect(path: Path, busy_timeout_seconds: float, statements: Sequence[str]) -> sqlite3.Connection:
    db = sqlite3.connect(
        f"{path.as_uri()}?mode=rw",  # a file that somebody removed is an error, not an empty cache
        uri=True,
        timeout=busy_timeout_seconds,
        isolation_level=None,  # transactions begin where we say so
        check_same_thread=False,  # threads share connections, one after the other
    )
    try:
        for statement in statements:
            db.execute(statement)
    except BaseException:
        db.close()
        raise
    return db


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
            for start in range(0, len(buffer), STEP_BYTES):
                buffer[start : start + STEP_BYTES] = blob.read(STEP_BYTES)
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_CORRUPT:  # the low byte; the rest says where
            raise
        return LoadOutcome.CORRUPT
    return LoadOutcome.HIT


def _key(path: str) -> ObjectKey:
    namespace, pack, digest = path.split("/")
    return ObjectKey(namespace, pack, bytes.fromhex(digest))
