"""The rows of a folder's account, within one transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from offload_core.api import ObjectKey

_AT_ONCE = 64


class Totals(NamedTuple):
    """Sums over all rows, in bytes; and whether everything in the folder is known."""

    objects: int
    protected: int
    reserved: int
    scanned: bool
    boot: str

    @property
    def used(self) -> int:
        """Bytes of objects and reservations."""
        return self.objects + self.reserved


class PackNames:
    """Numbers of packs, remembered between transactions."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, str], int] = {}
        self.names: dict[int, tuple[str, str]] = {}

    def clear(self) -> None:
        """Forget them: some may have been given in a transaction that came to nothing."""
        self.numbers.clear()
        self.names.clear()


class Records:
    """The account within one transaction. ``removed`` gets what was removed from the disk."""

    def __init__(self, sql: sqlite3.Connection, packs: PackNames) -> None:
        self._sql = sql
        self._packs = packs
        self.removed: list[ObjectKey] = []

    def totals(self) -> Totals:
        """Return the sums."""
        row = self._sql.execute("SELECT objects, protected, reserved, scanned, boot FROM totals").fetchone()
        return Totals(row[0], row[1], row[2], bool(row[3]), row[4])

    def set_scanned(self, boot: str) -> None:
        """Note that all folders were scanned since the machine started."""
        self._sql.execute("UPDATE totals SET scanned = 1, boot = ?", (boot,))

    def reserve(self, owner: str, key: ObjectKey, nbytes: int) -> int:
        """Add a reservation; returns its number."""
        row = (owner, self._pack(key), key.chunk_hash, nbytes)
        inserted = self._sql.execute("INSERT INTO reservations (owner, pack, hash, nbytes) VALUES (?, ?, ?, ?)", row)
        assert inserted.lastrowid is not None
        return inserted.lastrowid

    def end(self, reservations: Iterable[int]) -> None:
        """Remove reservations."""
        self._sql.executemany("DELETE FROM reservations WHERE id = ?", ((one,) for one in reservations))

    def reservations_of_others(self, owner: str) -> list[tuple[int, str, ObjectKey]]:
        """Return the reservations of all writers but one: number, writer and key."""
        rows = self._sql.execute("SELECT id, owner, pack, hash FROM reservations WHERE owner != ?", (owner,)).fetchall()
        return [(number, other, self._key(pack, chunk_hash)) for number, other, pack, chunk_hash in rows]

    def owners(self) -> set[str]:
        """Return who holds reservations."""
        return {owner for (owner,) in self._sql.execute("SELECT DISTINCT owner FROM reservations")}

    def put(self, objects: Iterable[tuple[ObjectKey, int, int]]) -> None:
        """Add objects (key, bytes, when they were used), or change them."""
        rows = ((self._pack(key), key.chunk_hash, nbytes, used) for key, nbytes, used in objects)
        self._sql.executemany(
            "INSERT INTO objects (pack, hash, nbytes, used) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (pack, hash) DO UPDATE SET nbytes = excluded.nbytes, used = max(used, excluded.used)",
            rows,
        )

    def drop(self, keys: Iterable[ObjectKey]) -> None:
        """Remove objects."""
        rows = ((self._pack(key), key.chunk_hash) for key in keys)
        self._sql.executemany("DELETE FROM objects WHERE pack = ? AND hash = ?", rows)

    def touch(self, used: Iterable[tuple[ObjectKey, int]], *, protect: bool) -> None:
        """Note when objects were used; unknown ones are passed over."""
        rows = ((at, self._pack(key), key.chunk_hash) for key, at in used)
        protected = ", protected = 1" if protect else ""
        self._sql.executemany(f"UPDATE objects SET used = max(used, ?){protected} WHERE pack = ? AND hash = ?", rows)

    def demote(self, excess_bytes: int, clock: Callable[[], int]) -> None:
        """Unprotect those protected objects whose use is longest ago, as if they were used now, in their order."""
        while excess_bytes > 0:
            rows = self._sql.execute(
                "SELECT pack, hash, nbytes FROM objects WHERE protected = 1 ORDER BY used LIMIT ?", (_AT_ONCE,)
            ).fetchall()
            if not rows:
                return
            for pack, chunk_hash, nbytes in rows:
                row = (clock(), pack, chunk_hash)
                self._sql.execute("UPDATE objects SET protected = 0, used = ? WHERE pack = ? AND hash = ?", row)
                excess_bytes -= nbytes
                if excess_bytes <= 0:
                    return

    def in_order(self) -> Iterator[tuple[ObjectKey, int]]:
        """Yield all objects with their bytes, the one to go first first. Change nothing before you are done."""
        rows = self._sql.execute("SELECT pack, hash, nbytes FROM objects ORDER BY protected, used")
        while some := rows.fetchmany(_AT_ONCE):
            yield from ((self._key(pack, chunk_hash), nbytes) for pack, chunk_hash, nbytes in some)

    def hashes(self, namespace: str, pack: str, after: bytes, up_to: bytes) -> dict[bytes, int]:
        """Return the objects of a pack whose hashes lie in a range, with their bytes."""
        number = self._pack(ObjectKey(namespace, pack, b""))
        return dict(
            self._sql.execute(
                "SELECT hash, nbytes FROM objects WHERE pack = ? AND hash > ? AND hash <= ?", (number, after, up_to)
            )
        )

    def folders(self) -> list[tuple[str, str, str]]:
        """Return where objects are said to be: namespace, pack and the first two digits."""
        found: list[tuple[str, str, str]] = []
        for number, namespace, pack in self._sql.execute("SELECT id, namespace, pack FROM packs").fetchall():
            last = b""
            while True:  # a step for each folder, not for each object
                row = self._sql.execute(
                    "SELECT hash FROM objects WHERE pack = ? AND hash > ? ORDER BY hash LIMIT 1", (number, last)
                ).fetchone()
                if row is None:
                    break
                found.append((namespace, pack, row[0][:1].hex()))
                last = row[0][:1] + b"\xff" * 64
        return found

    def _pack(self, key: ObjectKey) -> int:
        name = (key.namespace, key.pack)
        number = self._packs.numbers.get(name)
        if number is None:
            self._sql.execute("INSERT OR IGNORE INTO packs (namespace, pack) VALUES (?, ?)", name)
            (number,) = self._sql.execute("SELECT id FROM packs WHERE namespace = ? AND pack = ?", name).fetchone()
            self._packs.numbers[name] = number
        return number

    def _key(self, pack: int, chunk_hash: bytes) -> ObjectKey:
        if pack not in self._packs.names:
            row = self._sql.execute("SELECT namespace, pack FROM packs WHERE id = ?", (pack,)).fetchone()
            self._packs.names[pack] = (row[0], row[1])
        return ObjectKey(*self._packs.names[pack], chunk_hash)
