"""A log of the times at which objects were last used.

The backend keeps it because shared storage does not provide reliable access times. Each process collects its uses and
regularly writes them to a small file. The evicting process takes the latest of an object's storage time and all logged
uses. So the order of eviction is exact up to two errors: the interval between writes, and the difference between the
hosts' clocks.

The log also says which objects are spare. On the medium, a negative time stands for a touch that made an object spare.
Older releases take such an object for one that was never used. The latest entry of an object counts. An entry that is
more than ten seconds older than the object does not: its object was deleted, and stored again since.

A host's clock may be ahead and be corrected later. Its entries are later than their file, by the clock of the storage.
If they are more than ten seconds later, they are moved back to the time of the file, in their order. The clock of the
process that merges has no part in this, since it may be wrong too.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from offload_backend_nfs.capacity.account_state import is_name, new_name
from offload_backend_nfs.capacity.control_record import (
    DamagedRecordError,
    UnknownVersionError,
    compress,
    decompress,
    read_lines,
    seal,
    unseal,
    write_lines,
)
from offload_backend_nfs.capacity.ports import AccountFiles
from offload_backend_nfs.recent_keys import drop_oldest
from offload_backend_nfs.storage.failures import ForeignFileError
from offload_core.api import ObjectKey, TierLogger

_FOLDER = "touches"  # part of the format on the medium
_KIND = "touches"
_KEYS_PER_FILE = 16_384
_MAX_FILE_BYTES = 8 * 1024**2
"""The most bytes of a file, compressed or not. A line has at most 300."""
_FLUSH_INTERVAL_SECONDS = 30.0
_FLUSH_AT_KEYS = 4096
_MERGE_INTERVAL_SECONDS = 120.0
_MERGE_AT_FILES = 64
_MAX_KEYS = 131_072
"""Keys whose last use is remembered, the latest ones. For any other object its storage time counts."""
_CLOCK_TOLERANCE_SECONDS = 10.0
_TICK_SECONDS = 1e-6


class Recency(NamedTuple):
    """An object's place in the order of eviction: the smallest is evicted first."""

    kept: bool
    used_seconds: float


class UsageLog:
    """The logged uses of objects. Calls may come from any thread; all but the ``record`` methods block.

    Args:
        clock: returns seconds; decides when work is due.
        now: returns seconds since the epoch.
    """

    def __init__(
        self, files: AccountFiles, clock: Callable[[], float], now: Callable[[], float], log: TierLogger
    ) -> None:
        self._files = files
        self._log = log
        self._clock = clock
        self._now = now
        self._flushed_seconds = self._merged_seconds = clock()
        self._lock = threading.Lock()
        self._last_seconds = 0.0
        self._unflushed: dict[ObjectKey, float] = {}
        self._merged: dict[ObjectKey, float] = {}
        self._merged_files: set[str] = set()

    def record(self, keys: Iterable[ObjectKey]) -> None:
        """Record that objects are used now, in this order. Does not block."""
        self.record_touches((key, False) for key in keys)

    def record_touches(self, touches: Iterable[tuple[ObjectKey, bool]]) -> None:
        """Record that objects are touched now, in this order, and whether each is spare from now on. Does not block."""
        with self._lock:
            for key, is_spare in touches:
                now, later = self._now(), self._last_seconds + _TICK_SECONDS
                self._last_seconds = later if now < later < now + 1 else now  # the clock may be set back
                self._unflushed.pop(key, None)
                self._unflushed[key] = -self._last_seconds if is_spare else self._last_seconds
            drop_oldest(self._unflushed, _MAX_KEYS)

    def record_stored(self, key: ObjectKey, *, is_spare: bool) -> None:
        """Record that an object was stored. Does not block.

        A kept object needs no entry, unless this process knows an entry of a spare object with the same key.
        """
        if is_spare or self._unflushed.get(key, 0.0) < 0 or self._merged.get(key, 0.0) < 0:
            self.record_touches([(key, is_spare)])

    def flush_if_due(self) -> None:
        """Flush if there are many recorded uses, or if the last flush was long ago.

        Raises:
            OSError: the medium failed. The next call tries again.
        """
        is_late = self._clock() - self._flushed_seconds >= _FLUSH_INTERVAL_SECONDS
        if len(self._unflushed) >= _FLUSH_AT_KEYS or is_late:
            self.flush()

    def flush(self) -> None:
        """Write the uses that were recorded since the last flush.

        Raises:
            OSError: the medium failed. The next call tries again.
        """
        with self._lock:
            uses, self._unflushed = self._unflushed, {}
        try:
            self._write(uses)
        except OSError:
            with self._lock:
                self._unflushed = {**uses, **self._unflushed}  # the later ones win
                drop_oldest(self._unflushed, _MAX_KEYS)
            raise
        self._flushed_seconds = self._clock()

    def merge_if_due(self) -> None:
        """Merge if the last merge was long ago. So the files stay few even if nothing is evicted.

        Raises:
            OSError: the medium failed.
        """
        if self._clock() - self._merged_seconds >= _MERGE_INTERVAL_SECONDS:
            self.merge()

    def merge(self) -> dict[ObjectKey, float]:
        """Read the files of all processes, and replace many files by one.

        Returns:
            Per key its last use, in seconds since the epoch, as far as processes have flushed it. If the time is
            negative, the object was made spare then.

        Raises:
            OSError: the medium failed.
        """
        self._merged_seconds = self._clock()
        names = list(filter(is_name, self._files.names(_FOLDER)))
        damaged: list[str] = []
        write_times = self._files.write_times(_FOLDER) if not self._merged_files.issuperset(names) else {}
        for name in names:
            if name not in self._merged_files:
                try:
                    self._merge_file(name, write_times.get(name, math.inf))
                except (DamagedRecordError, UnknownVersionError, ForeignFileError) as error:
                    damaged.append(f"{name}: {error}; {self._files.set_aside(f'{_FOLDER}/{name}')}")
                self._merged_files.add(name)
        self._merged_files.intersection_update(names)
        if damaged:
            self._log.warning(
                "%d usage logs are damaged and are not used, among them %s. Some objects may be evicted too early",
                len(damaged),
                damaged[0],
            )
        if len(names) >= _MERGE_AT_FILES:
            self._write(self._merged)
            self._files.delete([f"{_FOLDER}/{name}" for name in names])
        return self._merged

    def keep_only(self, keys: set[ObjectKey]) -> None:
        """Drop the merged uses of all other keys."""
        self._merged = {key: used for key, used in self._merged.items() if key in keys}

    def drop_merged(self) -> None:
        """Drop all merged uses, because another process merges now."""
        self._merged, self._merged_files = {}, set()

    def _write(self, uses: dict[ObjectKey, float]) -> None:
        items = iter(uses.items())
        while some := list(itertools.islice(items, _KEYS_PER_FILE)):
            name = new_name()
            self._files.write(f"{_FOLDER}/{name}", seal(_KIND, compress(write_lines(some)), name))

    def _merge_file(self, name: str, written_seconds: float) -> None:
        """Add the uses in a file to the merged ones.

        Args:
            written_seconds: the time at which the file was written.

        Raises:
            DamagedRecordError, UnknownVersionError, ForeignFileError: the file cannot be used. Nothing is added.
        """
        content = self._files.read(f"{_FOLDER}/{name}", _MAX_FILE_BYTES)
        if content is None:
            return
        uses: dict[ObjectKey, float] = {}
        for key, number in read_lines(decompress(unseal(_KIND, content, name), _MAX_FILE_BYTES)):
            try:
                uses[key] = float(number)
            except ValueError as error:
                raise DamagedRecordError(f"the use of {key} has no time: {error}") from error
            if not math.isfinite(uses[key]):
                raise DamagedRecordError(f"the use of {key} has the time {uses[key]}")
        for key, used in _not_later_than(written_seconds, uses).items():
            self._merged[key] = max(used, self._merged.get(key, 0.0), key=abs)
        if len(self._merged) > _MAX_KEYS:
            latest = sorted(self._merged.items(), key=lambda item: abs(item[1]))[-_MAX_KEYS:]
            self._merged = dict(latest)


def _not_later_than(written_seconds: float, uses: dict[ObjectKey, float]) -> dict[ObjectKey, float]:
    """Return the uses in a file; if a clock was ahead, move those after the file's time back, in their order."""
    lead = max(map(abs, uses.values()), default=0.0) - written_seconds
    if lead <= _CLOCK_TOLERANCE_SECONDS:
        return uses
    return {
        key: used if abs(used) <= written_seconds else math.copysign(max(abs(used) - lead, _TICK_SECONDS), used)
        for key, used in uses.items()
    }


def recency(used_seconds: float, stored_at_seconds: float) -> Recency:
    """Return the place of an object in the order of eviction.

    Args:
        used_seconds: its entry in the merged log, 0 if there is none.
        stored_at_seconds: its storage time, by the clock of the storage.
    """
    is_spare = used_seconds < 0 and -used_seconds + _CLOCK_TOLERANCE_SECONDS >= stored_at_seconds
    return Recency(not is_spare, max(abs(used_seconds), stored_at_seconds))
