"""The database of a folder's account: its tables, and the transactions of several processes.

Everything here blocks. One thread at a time.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from offload_backend_disk.folder.files import DISK_FULL_ERRNOS

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 3

_BUSY_SECONDS = 10.0
_SHORTEST_PAUSE_SECONDS = 0.0002
_LONGEST_PAUSE_SECONDS = 0.005
_SCHEMA = """
CREATE TABLE packs (id INTEGER PRIMARY KEY, namespace TEXT NOT NULL, pack TEXT NOT NULL, UNIQUE (namespace, pack));
CREATE TABLE objects (
    pack INTEGER NOT NULL, hash BLOB NOT NULL, nbytes INTEGER NOT NULL, used INTEGER NOT NULL,
    segment INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (pack, hash)
) WITHOUT ROWID;
CREATE INDEX objects_by_use ON objects (segment, used);
CREATE TABLE reservations (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    owner TEXT NOT NULL, pack INTEGER NOT NULL, hash BLOB NOT NULL, nbytes INTEGER NOT NULL, segment INTEGER NOT NULL
);
CREATE TABLE totals (
    objects INTEGER NOT NULL DEFAULT 0, protected INTEGER NOT NULL DEFAULT 0, reserved INTEGER NOT NULL DEFAULT 0,
    scanned INTEGER NOT NULL DEFAULT 0, boot TEXT NOT NULL DEFAULT ''
);
INSERT INTO totals DEFAULT VALUES;
CREATE TRIGGER object_added AFTER INSERT ON objects BEGIN
    UPDATE totals SET objects = objects + NEW.nbytes, protected = protected + NEW.nbytes * (NEW.segment = 1);
END;
CREATE TRIGGER object_changed AFTER UPDATE OF nbytes, segment ON objects
WHEN NEW.nbytes != OLD.nbytes OR NEW.segment != OLD.segment BEGIN
    UPDATE totals SET objects = objects + NEW.nbytes - OLD.nbytes,
        protected = protected + NEW.nbytes * (NEW.segment = 1) - OLD.nbytes * (OLD.segment = 1);
END;
CREATE TRIGGER object_gone AFTER DELETE ON objects BEGIN
    UPDATE totals SET objects = objects - OLD.nbytes, protected = protected - OLD.nbytes * (OLD.segment = 1);
END;
CREATE TRIGGER room_added AFTER INSERT ON reservations BEGIN UPDATE totals SET reserved = reserved + NEW.nbytes; END;
CREATE TRIGGER room_gone AFTER DELETE ON reservations BEGIN UPDATE totals SET reserved = reserved - OLD.nbytes; END;
"""


class Database:
    """An SQLite database that several processes use.

    Args:
        path: its file. It is created if it is missing, damaged, or of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection: sqlite3.Connection | None = None
        self._file_status: os.stat_result | None = None

    def open(self) -> None:
        """Connect. One process at a time: SQLite does not wait while another process turns on WAL mode.

        Raises:
            OSError: the folder cannot be written, or is full.
        """
        with self._sqlite_errors_as_os_errors():
            try:
                self._connect()
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                self._remove_files()
                self._connect()

    def close(self) -> None:
        """Disconnect. Idempotent."""
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    @property
    def is_in_place(self) -> bool:
        """True if the database is open and its file was neither removed nor replaced."""
        try:
            return (
                self._connection is not None
                and self._file_status is not None
                and os.path.samestat(self.path.stat(), self._file_status)
            )
        except FileNotFoundError:
            return False

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run one transaction, all or nothing.

        Raises:
            OSError: another process has locked the database for ten seconds; or the disk has failed, or is full.
        """
        sql = self._connection
        if sql is None:
            raise OSError(f"{self.path}: the account is not open")
        with self._sqlite_errors_as_os_errors():
            _begin(sql)
            try:
                yield sql
                sql.execute("COMMIT")
            finally:
                if sql.in_transaction:
                    sql.execute("ROLLBACK")

    def _connect(self) -> None:
        sql = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            sql.execute("PRAGMA journal_mode = WAL")
            sql.execute("PRAGMA synchronous = NORMAL")  # a crash of the machine may undo the latest changes
            sql.execute("BEGIN IMMEDIATE")
            (version,) = sql.execute("PRAGMA user_version").fetchone()
            if version != SCHEMA_VERSION:
                _drop_everything(sql)
                for statement in _statements(_SCHEMA):
                    sql.execute(statement)
                sql.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            sql.execute("COMMIT")
            sql.execute("PRAGMA busy_timeout = 0")  # from here on _begin waits, in shorter steps
        except BaseException:
            sql.close()
            raise
        self._connection = sql
        self._file_status = self.path.stat()

    def _remove_files(self) -> None:
        for damaged in self.path.parent.glob(f"{self.path.name}*"):
            damaged.unlink(missing_ok=True)

    @contextmanager
    def _sqlite_errors_as_os_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0)  # errors of the sqlite3 module itself have none
            if code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) and self.is_in_place:
                logger.warning("%s is damaged (%s); a scan of the folder rebuilds it", self.path, error)
                self._remove_files()
            number = errno.ENOSPC if code == sqlite3.SQLITE_FULL or self._is_full() else errno.EIO
            raise OSError(number, f"{error}", str(self.path)) from error

    def _is_full(self) -> bool:
        """Return whether the disk or a quota is full. SQLite's own error does not always say so."""
        probe = self.path.with_name(f"probe-{os.getpid()}")
        try:
            probe.write_bytes(bytes(64 * 1024))
        except OSError as error:
            return error.errno in DISK_FULL_ERRNOS
        finally:
            with suppress(OSError):
                probe.unlink(missing_ok=True)
        return False


def _begin(sql: sqlite3.Connection) -> None:
    """Begin a transaction after those of other processes. SQLite would wait in steps of up to 100 ms, too long."""
    deadline = time.monotonic() + _BUSY_SECONDS
    pause = _SHORTEST_PAUSE_SECONDS
    while True:
        try:
            sql.execute("BEGIN IMMEDIATE")
            return
        except sqlite3.OperationalError as error:
            busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not busy or time.monotonic() > deadline:
                raise
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE_SECONDS)


def _drop_everything(sql: sqlite3.Connection) -> None:
    """Drop the tables of another version. The file stays: a process of that version may still have it open."""
    tables = sql.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'").fetchall()
    for (name,) in tables:
        sql.execute(f'DROP TABLE "{name}"')


def _statements(script: str) -> Iterator[str]:
    """Split a script into statements, since ``executescript`` would commit our transaction."""
    statement = ""
    for line in script.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
