"""The rows of a folder's account, within one transaction."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from offload_backend_disk.capacity.database import damage
from offload_core.api import ObjectKey

_ROWS_PER_STEP = 64
_NAME = re.compile(r"[0-9a-z-]{1,64}")


class Segment(IntEnum):
    """The segments of the order of eviction, the first to evict first. The database holds these numbers."""

    SPARE = -1
    UNPROTECTED = 0
    PROTECTED = 1


class LeftReservation(NamedTuple):
    """A reservation of another process.

    Args:
        number: its number.
        process: the process.
        key: the object that it is for.
        segment: the segment of the object, if it is stored.
    """

    number: int
    process: str
    key: ObjectKey
    segment: Segment


class Totals(NamedTuple):
    """Sums over all rows, in bytes; and the state of the scan.

    Args:
        objects: bytes of all objects.
        protected: bytes of the protected ones among them.
        reserved: bytes of all reservations.
        scanned: the account has every object of the folder.
        boot: the boot of the machine in which the last scan ended.
    """

    objects: int
    protected: int
    reserved: int
    scanned: bool
    boot: str

    @property
    def used(self) -> int:
        """Bytes of objects and reservations."""
        return self.objects + self.reserved


class PackNumbers:
    """The numbers that stand for packs in the rows, kept between transactions."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, str], int] = {}
        self.names: dict[int, tuple[str, str]] = {}

    def clear(self) -> None:
        """Forget them all: a transaction that failed may have assigned some."""
        self.numbers.clear()
        self.names.clear()


class Rows:
    """The account within one transaction.

    Attributes:
        removed_files: the objects that the transaction has removed from the disk.
    """

    def __init__(self, sql: sqlite3.Connection, pack_numbers: PackNumbers) -> None:
        self._sql = sql
        self._pack_numbers = pack_numbers
        self.removed_files: list[ObjectKey] = []

    def totals(self) -> Totals:
        """Return the sums."""
        rows = self._sql.execute("SELECT objects, protected, reserved, scanned, boot FROM totals").fetchall()
        if len(rows) != 1 or not all(isinstance(number, int) and number >= 0 for number in rows[0][:4]):
            raise damage(f"its totals are {rows[:2]}")
        ((objects, protected, reserved, scanned, boot),) = rows
        return Totals(objects, protected, reserved, bool(scanned), str(boot))

    def set_scanned(self, boot: str) -> None:
        """Record that all folders were scanned in this boot of the machine."""
        self._sql.execute("UPDATE totals SET scanned = 1, boot = ?", (boot,))

    def add_reservation(self, process: str, key: ObjectKey, nbytes: int, segment: Segment) -> int:
        """Add a reservation; returns its number."""
        row = (process, self._number(key), key.chunk_hash, nbytes, segment)
        inserted = self._sql.execute(
            "INSERT INTO reservations (owner, pack, hash, nbytes, segment) VALUES (?, ?, ?, ?, ?)", row
        )
        assert inserted.lastrowid is not None
        return inserted.lastrowid

    def remove_reservations(self, numbers: Iterable[int]) -> None:
        """Remove reservations."""
        self._sql.executemany("DELETE FROM reservations WHERE id = ?", ((number,) for number in numbers))

    def reservations_of_others(self, process: str) -> list[LeftReservation]:
        """Return the reservations of all processes but one."""
        query = "SELECT id, owner, pack, hash, segment FROM reservations WHERE owner != ?"
        rows = self._sql.execute(query, (process,)).fetchall()
        return [
            LeftReservation(number, _process(other), self._key(pack, chunk_hash), _segment(segment))
            for number, other, pack, chunk_hash, segment in rows
        ]

    def reserving_processes(self) -> set[str]:
        """Return the processes that have reservations."""
        return {_process(process) for (process,) in self._sql.execute("SELECT DISTINCT owner FROM reservations")}

    def put_objects(self, objects: Iterable[tuple[ObjectKey, int, int, Segment]]) -> None:
        """Add or change objects: key, bytes, time of the last use, and segment. No object that has a row is demoted."""
        rows = ((self._number(key), key.chunk_hash, *values) for key, *values in objects)
        self._sql.executemany(
            "INSERT INTO objects (pack, hash, nbytes, used, segment) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (pack, hash) DO UPDATE SET nbytes = excluded.nbytes, used = max(used, excluded.used), "
            "segment = max(segment, excluded.segment)",
            rows,
        )

    def remove_objects(self, keys: Iterable[ObjectKey]) -> None:
        """Remove objects."""
        rows = ((self._number(key), key.chunk_hash) for key in keys)
        self._sql.executemany("DELETE FROM objects WHERE pack = ? AND hash = ?", rows)

    def record_use(self, used_ns: Iterable[tuple[ObjectKey, int]], *, protect: bool) -> None:
        """Record the times of use of objects; an object without a row, or made spare later, is left alone."""
        least = Segment.PROTECTED if protect else Segment.UNPROTECTED
        rows = ((at, least, self._number(key), key.chunk_hash, at) for key, at in used_ns)
        self._sql.executemany(
            "UPDATE objects SET used = max(used, ?), segment = max(segment, ?) "
            "WHERE pack = ? AND hash = ? AND (segment >= 0 OR used <= ?)",
            rows,
        )

    def keep(self, touched_ns: Iterable[tuple[ObjectKey, int]]) -> None:
        """Record times at which objects were touched as kept; an object without a row, or used later, is left alone."""
        self._touch("max(segment, 0)", touched_ns)

    def make_spare(self, touched_ns: Iterable[tuple[ObjectKey, int]]) -> None:
        """Record times at which objects were made spare; an object without a row, or used later, is left alone."""
        self._touch("-1", touched_ns)

    def _touch(self, segment: str, touched_ns: Iterable[tuple[ObjectKey, int]]) -> None:
        rows = ((at, self._number(key), key.chunk_hash, at) for key, at in touched_ns)
        self._sql.executemany(
            f"UPDATE objects SET used = ?, segment = {segment} WHERE pack = ? AND hash = ? AND used <= ?", rows
        )

    def demote(self, excess_bytes: int, next_time_ns: Callable[[], int]) -> None:
        """Unprotect the least recently used protected objects, in that order, as if they were used now."""
        while excess_bytes > 0:
            rows = self._sql.execute(
                "SELECT pack, hash, nbytes FROM objects WHERE segment = 1 ORDER BY used LIMIT ?", (_ROWS_PER_STEP,)
            ).fetchall()
            if not rows:
                return
            for pack, chunk_hash, nbytes in rows:
                row = (next_time_ns(), pack, chunk_hash)
                self._sql.execute("UPDATE objects SET segment = 0, used = ? WHERE pack = ? AND hash = ?", row)
                excess_bytes -= _nbytes(nbytes)
                if excess_bytes <= 0:
                    return

    def correct_future_uses(self, now_ns: int, tolerance_ns: int) -> None:
        """If a time of use is later than now, a clock was set back. Move all such times into the past, in their order.

        Args:
            tolerance_ns: a lead that is left alone.
        """
        last_ns = 0
        for segment in Segment:  # each by one step in the index
            (used_ns,) = self._sql.execute("SELECT max(used) FROM objects WHERE segment = ?", (segment,)).fetchone()
            last_ns = max(last_ns, used_ns or 0)
        if last_ns > now_ns + tolerance_ns:
            self._sql.execute("UPDATE objects SET used = used - ? WHERE used > ?", (last_ns - now_ns, now_ns))

    def in_eviction_order(self) -> Iterator[tuple[ObjectKey, int]]:
        """Yield all objects with their bytes, the next to evict first. Change no row before the iteration ends."""
        rows = self._sql.execute("SELECT pack, hash, nbytes FROM objects ORDER BY segment, used")
        while some := rows.fetchmany(_ROWS_PER_STEP):
            yield from ((self._key(pack, chunk_hash), _nbytes(nbytes)) for pack, chunk_hash, nbytes in some)

    def objects_between(self, namespace: str, pack: str, after: bytes, up_to: bytes) -> dict[bytes, int]:
        """Return the bytes of a pack's objects by hash, for hashes above ``after`` and at most ``up_to``."""
        number = self._number(ObjectKey(namespace, pack, b""))
        return dict(
            self._sql.execute(
                "SELECT hash, nbytes FROM objects WHERE pack = ? AND hash > ? AND hash <= ?", (number, after, up_to)
            )
        )

    def folders(self) -> list[tuple[str, str, str]]:
        """Return the folders of all objects: namespace, pack and the hash's first two digits."""
        found: list[tuple[str, str, str]] = []
        for number, *names in self._sql.execute("SELECT id, namespace, pack FROM packs").fetchall():
            namespace, pack = _pack(names)
            last = b""
            while True:  # one step per folder, not per object
                row = self._sql.execute(
                    "SELECT hash FROM objects WHERE pack = ? AND hash > ? ORDER BY hash LIMIT 1", (number, last)
                ).fetchone()
                if row is None:
                    break
                if _hash(row[0]) <= last:
                    raise damage(f"its object {row[0]!r} is out of order")
                found.append((namespace, pack, row[0][:1].hex()))
                last = row[0][:1] + b"\xff" * 64
        return found

    def _number(self, key: ObjectKey) -> int:
        """Return the number of the key's pack."""
        name = (key.namespace, key.pack)
        number = self._pack_numbers.numbers.get(name)
        if number is None:
            self._sql.execute("INSERT OR IGNORE INTO packs (namespace, pack) VALUES (?, ?)", name)
            row = self._sql.execute("SELECT id FROM packs WHERE namespace = ? AND pack = ?", name).fetchone()
            if row is None:
                raise damage(f"it lost the pack {name}")
            number = self._pack_numbers.numbers[name] = int(row[0])
        return number

    def _key(self, number: int, chunk_hash: bytes) -> ObjectKey:
        """Return the key of an object in the pack with this number."""
        if number not in self._pack_numbers.names:
            row = self._sql.execute("SELECT namespace, pack FROM packs WHERE id = ?", (number,)).fetchone()
            self._pack_numbers.names[number] = _pack(row)
        return ObjectKey(*self._pack_numbers.names[number], _hash(chunk_hash))


def _pack(names: Sequence[object] | None) -> tuple[str, str]:
    if names is None or not all(isinstance(name, str) and _NAME.fullmatch(name) for name in names):
        raise damage(f"it has a pack {names}")
    return str(names[0]), str(names[1])


def _hash(chunk_hash: object) -> bytes:
    if not isinstance(chunk_hash, bytes) or not chunk_hash:
        raise damage(f"it has an object with the hash {chunk_hash!r}")
    return chunk_hash


def _process(name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise damage(f"it has a reservation of {name!r}")
    return name


def _segment(number: object) -> Segment:
    if not isinstance(number, int) or number not in list(Segment):
        raise damage(f"it has a reservation in the segment {number!r}")
    return Segment(number)


def _nbytes(number: object) -> int:
    if not isinstance(number, int) or number < 0:
        raise damage(f"it has an object of {number!r} bytes")
    return number
