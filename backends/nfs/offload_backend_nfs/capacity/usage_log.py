"""A log of the times at which objects were last used.

The backend keeps it because shared storage does not provide reliable access times. Each process collects its uses and
regularly writes them to a small file. The evicting process takes the latest of an object's storage time and all logged
uses. So the order of eviction is exact up to two errors: the interval between writes, and the difference between the
hosts' clocks.

The log also says which objects are spare. On the medium, a negative time stands for a touch that made an object spare.
Older releases take such an object for one that was never used. The latest entry of an object counts. An entry that is
more than ten seconds older than the object does not: its object was deleted, and stored again since.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import zlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

from offload_backend_nfs.capacity.account_state import parse_key
from offload_backend_nfs.capacity.ports import AccountFiles
from offload_core.api import ObjectKey

logger = logging.getLogger(__name__)

_FOLDER = "touches"  # part of the format on the medium
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

    def __init__(self, files: AccountFiles, clock: Callable[[], float], now: Callable[[], float]) -> None:
        self._files = files
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
                self._unflushed[key] = -self._last_seconds if is_spare else self._last_seconds

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
        names = self._files.names(_FOLDER)
        for name in names:
            if name not in self._merged_files:
                for key, used in self._read_file(name).items():
                    self._merged[key] = max(used, self._merged.get(key, 0.0), key=abs)
                self._merged_files.add(name)
        self._merged_files.intersection_update(names)
        if len(self._merged) > _MAX_KEYS:
            latest = sorted(self._merged.items(), key=lambda item: abs(item[1]))[-_MAX_KEYS:]
            self._merged = dict(latest)
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
        if uses:
            body = zlib.compress(json.dumps({key.path: used for key, used in uses.items()}).encode(), 1)
            self._files.write(f"{_FOLDER}/{secrets.token_hex(8)}", body)

    def _read_file(self, name: str) -> dict[ObjectKey, float]:
        content = self._files.read(f"{_FOLDER}/{name}")
        if content is None:
            return {}
        try:
            return {parse_key(path): float(used) for path, used in json.loads(zlib.decompress(content)).items()}
        except (zlib.error, ValueError) as error:
            logger.warning("the usage log %s/%s is damaged and is skipped: %s", _FOLDER, name, error)
            return {}


def recency(used_seconds: float, stored_at_seconds: float) -> Recency:
    """Return the place of an object in the order of eviction.

    Args:
        used_seconds: its entry in the merged log, 0 if there is none.
        stored_at_seconds: its storage time, by the clock of the storage.
    """
    is_spare = used_seconds < 0 and -used_seconds + _CLOCK_TOLERANCE_SECONDS >= stored_at_seconds
    return Recency(not is_spare, max(abs(used_seconds), stored_at_seconds))
