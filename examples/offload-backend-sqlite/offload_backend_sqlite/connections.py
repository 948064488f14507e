"""The database file: its creation, its format, and its connections. Everything here blocks."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from offload_backend_sqlite.processes import FILE_MODE

FORMAT = 0x6B7631  # "kv1"; a file of any other format or version is refused and left as it is

READ = "BEGIN"
WRITE = "BEGIN IMMEDIATE"  # takes the write lock now: a transaction that takes it later cannot wait for it, but fails

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
    "PRAGMA foreign_keys = ON",  # a row that leaves objects leaves contents too
)


class Connections:
    """The connections to one database file; a transaction borrows one.

    Every method may raise ``OSError``: the file cannot be used, or another process kept it locked for too long.
    """

    def __init__(self, path: Path, busy_timeout_seconds: float) -> None:
        self._path = path
        self._busy_timeout_seconds = busy_timeout_seconds
        self._idle: list[sqlite3.Connection] = []

    def create_file(self, temporary_name: str) -> None:
        """Create the file and its tables if they are missing.

        The new file gets a temporary name first. No process may open it before it has WAL mode and mode 0600.
        """
        if self._path.exists():
            return
        new = self._path.with_name(temporary_name)
        os.mknod(new, FILE_MODE)  # SQLite gives the same mode to the files -wal and -shm
        try:
            with _sqlite_errors_as_os_errors(new):
                _connect(new, self._busy_timeout_seconds, SCHEMA).close()
            with suppress(FileExistsError):  # another process was faster
                os.link(new, self._path)
        finally:
            new.unlink()

    def check_format(self, db: sqlite3.Connection) -> None:
        """Refuse a file of another format or version."""
        if db.execute("PRAGMA application_id").fetchone() != (FORMAT,):
            raise OSError(
                errno.EINVAL,
                "not a database of this version of this backend; name another file, or delete it if it is an old cache",
                str(self._path),
            )

    @contextmanager
    def transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        """Lend a connection for one transaction. It is committed at the end, and rolled back after an error.

        Args:
            begin: ``READ`` or ``WRITE``.
        """
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

    def close(self) -> None:
        """Close all connections. No transaction may be running. Idempotent."""
        while self._idle:
            self._idle.pop().close()


def _connect(path: Path, busy_timeout_seconds: float, statements: Sequence[str]) -> sqlite3.Connection:
    db = sqlite3.connect(
        f"{path.as_uri()}?mode=rw",  # a file that was deleted is an error, not an empty cache
        uri=True,
        timeout=busy_timeout_seconds,
        isolation_level=None,  # every transaction begins with an explicit BEGIN
        check_same_thread=False,  # threads share connections, one after the other
    )
    try:
        for statement in statements:
            db.execute(statement)
    except BaseException:
        db.close()
        raise
    return db


@contextmanager
def _sqlite_errors_as_os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise OSError(errno.EIO, f"SQLite: {error}", str(path)) from error
