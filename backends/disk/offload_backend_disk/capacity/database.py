"""The database of a folder's account: its tables, and the transactions of several processes.

Everything here blocks. One thread at a time.
"""

from __future__ import annotations

import errno
import functools
import os
import sqlite3
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from offload_backend_disk.folder.control_files import (
    LOCK_SECONDS,
    close_control_file,
    held_by_another,
    is_own_file,
    open_control_file,
    set_aside,
)
from offload_backend_disk.folder.files import DISK_FULL_ERRNOS, FILE_MODE
from offload_core.api import TierLogger

SCHEMA_VERSION = 3

_HELD_AFTER_SECONDS = 0.25
_HELD_BUSY_SECONDS = 0.02
_SHORTEST_PAUSE_SECONDS = 0.0002
_LONGEST_PAUSE_SECONDS = 0.005
_FILE_SUFFIXES = ("", "-wal", "-shm", "-journal")
_FAULTS_OF_THE_DISK = (
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR),
    *(sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_READONLY),
)
"""Errors of SQLite that do not mean a damaged file."""
_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""The ``sqlite3`` module cannot decode SQLite's message if that quotes a damaged name."""
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
        path: its file. It is created if it is missing, damaged, or of another version. A damaged one is set aside.

    Attributes:
        is_held: another process has held the database for so long that it may be stopped. A transaction then waits only
            for a moment.
    """

    def __init__(self, path: Path, log: TierLogger) -> None:
        self.path = path
        self._log = log
        self._connection: sqlite3.Connection | None = None
        self._file_status: os.stat_result | None = None
        self.is_held = False

    def open(self, wait_seconds: float = LOCK_SECONDS) -> None:
        """Connect. One process at a time: SQLite does not wait while another process turns on WAL mode.

        Args:
            wait_seconds: the longest wait for a transaction of another process.

        Raises:
            TimeoutError: another process holds the database.
            OSError: the folder cannot be written, or is full.
        """
        with self._sqlite_errors_as_os_errors():
            try:
                self._connect(wait_seconds)
            except _ERRORS as error:
                if not self._is_damage(error):
                    raise
                self._set_aside(error)
                self._connect(wait_seconds)

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
    def transaction(self, wait_seconds: float = LOCK_SECONDS) -> Iterator[sqlite3.Connection]:
        """Run one transaction, all or nothing.

        Args:
            wait_seconds: the longest wait for a transaction of another process.

        Raises:
            TimeoutError: another process has held the database for so long.
            OSError: the disk has failed, or is full.
        """
        sql = self._connection
        if sql is None:
            raise OSError(f"{self.path}: the account is not open")
        with self._sqlite_errors_as_os_errors():
            self._begin(sql, wait_seconds)
            try:
                yield sql
                sql.execute("COMMIT")
            finally:
                if sql.in_transaction:
                    sql.execute("ROLLBACK")

    def _begin(self, sql: sqlite3.Connection, wait_seconds: float) -> None:
        """Begin a transaction after those of other processes. SQLite would wait in steps of up to 100 ms, too long."""
        began = time.monotonic()
        wait_seconds = _HELD_BUSY_SECONDS if self.is_held else wait_seconds
        pause = _SHORTEST_PAUSE_SECONDS
        while True:
            try:
                sql.execute("BEGIN IMMEDIATE")
                self.is_held = False
                return
            except sqlite3.OperationalError as error:
                waited = time.monotonic() - began
                self.is_held = self.is_held or waited > _HELD_AFTER_SECONDS
                if not _is_busy(error) or waited > wait_seconds:
                    raise
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_SECONDS)

    def _connect(self, wait_seconds: float) -> None:
        self._make_files_private()
        sql = sqlite3.connect(self.path, timeout=wait_seconds, isolation_level=None, check_same_thread=False)
        try:
            sql.text_factory = _lenient_text
            sql.execute("PRAGMA journal_mode = WAL")
            sql.execute("PRAGMA synchronous = NORMAL")  # a crash of the machine may undo the latest changes
            sql.execute("BEGIN IMMEDIATE")
            (version,) = sql.execute("PRAGMA user_version").fetchone()
            if version != SCHEMA_VERSION:
                _drop_everything(sql)
                for statement in _statements(_SCHEMA):
                    sql.execute(statement)
                sql.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            if _schema_of(sql) != _schema_entries():
                raise damage("its tables are of another program")
            sql.execute("COMMIT")
            sql.execute("PRAGMA busy_timeout = 0")  # from here on _begin waits, in shorter steps
        except BaseException:
            sql.close()
            raise
        self._connection = sql
        self._file_status = self.path.stat()

    def _make_files_private(self) -> None:
        """Make the database's files private. SQLite gives the others the mode of the first one.

        Nothing but a new file is opened here: the end of any descriptor releases SQLite's locks in this process.
        """
        for path in self._files():
            try:
                status = os.lstat(path)
            except FileNotFoundError:
                continue
            if not is_own_file(path, status):
                set_aside(path, "it is no file of this process's user", self._log)
            elif stat.S_IMODE(status.st_mode) != FILE_MODE:
                path.chmod(FILE_MODE)
        with suppress(FileExistsError):
            close_control_file(open_control_file(self.path, self._log, os.O_RDWR | os.O_EXCL))

    def _set_aside(self, error: Exception) -> None:
        file, *others = self._files()
        set_aside(file, f"it is damaged: {error}; a scan of the folder rebuilds it", self._log)
        for other in others:  # worth nothing without the first one
            other.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return [self.path.with_name(self.path.name + suffix) for suffix in _FILE_SUFFIXES]

    def _is_damage(self, error: Exception) -> bool:
        """Return whether an error comes from the file's content."""
        if isinstance(error, UnicodeDecodeError):
            return True
        if not isinstance(error, sqlite3.DatabaseError) or isinstance(error, sqlite3.ProgrammingError):
            return False
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        if code == sqlite3.SQLITE_READONLY:  # a damaged file may forbid writes; so may the disk
            return os.access(self.path, os.W_OK)
        return code not in _FAULTS_OF_THE_DISK

    @contextmanager
    def _sqlite_errors_as_os_errors(self) -> Iterator[None]:
        try:
            yield
        except _ERRORS as error:
            code = getattr(error, "sqlite_errorcode", 0)  # errors of the sqlite3 module itself have none
            if _is_busy(error):
                raise held_by_another(self.path, LOCK_SECONDS) from error
            if self._is_damage(error) and self.is_in_place:
                self._set_aside(error)
            number = errno.ENOSPC if code == sqlite3.SQLITE_FULL or self._is_full() else errno.EIO
            raise OSError(number, f"{error}", str(self.path)) from error

    def _is_full(self) -> bool:
        """Return whether the disk or a quota is full. SQLite's own error does not always say so."""
        try:
            with tempfile.TemporaryFile(dir=self.path.parent) as probe:
                probe.write(bytes(64 * 1024))
        except OSError as error:
            return error.errno in DISK_FULL_ERRNOS
        return False


def damage(reason: str) -> sqlite3.DatabaseError:
    """Return the error for a content that this package does not write."""
    error = sqlite3.DatabaseError(reason)
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


def _is_busy(error: Exception) -> bool:
    """Return whether another process has locked the database."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)


def _lenient_text(content: bytes) -> str:
    """Decode a text; damage becomes a text that no check accepts."""
    return content.decode(errors="replace")


def _schema_of(sql: sqlite3.Connection) -> list[tuple[str, str, str]]:
    """Return the type, name and definition of all tables, indices and triggers."""
    entries = sql.execute("SELECT type, name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'").fetchall()
    return sorted(entries, key=str)


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


@functools.cache
def _schema_entries() -> list[tuple[str, str, str]]:
    """Return the entries of a good database. Made when the first one is opened, since an import needs none."""
    with closing(sqlite3.connect(":memory:")) as sql:
        for statement in _statements(_SCHEMA):
            sql.execute(statement)
        return _schema_of(sql)
