"""When objects were used last: records of the backend's own, since access times are not to be had on shared storage.

Each process notes what it uses and writes that down now and then, in a small object. Who evicts takes the latest of an
object's own time and all records. So the order is true up to how often records are written, and up to how far the
hosts' clocks are apart.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import zlib
from collections.abc import Callable, Iterable

from offload_backend_nfs.capacity.pending_evictions import parse_key
from offload_backend_nfs.capacity.ports import SmallObjects
from offload_core.api import ObjectKey

logger = logging.getLogger(__name__)

FOLDER = "touches"
WRITTEN_AFTER_SECONDS = 30.0
_WRITTEN_AT = 4096
_MERGED_AFTER_SECONDS = 120.0
_MERGED_AT = 64
_MOST_KEPT = 131_072
"""Uses that are remembered, the latest; older ones give way to the time an object was stored."""


class Touches:
    """The uses of objects. Calls block but for :meth:`note`, and may come from any thread.

    Args:
        clock: seconds, to know when something is due.
        now: seconds since the epoch.
    """

    def __init__(self, small: SmallObjects, clock: Callable[[], float], now: Callable[[], float]) -> None:
        self._small = small
        self._clock = clock
        self._now = now
        self._written_seconds = self._merged_seconds = clock()
        self._lock = threading.Lock()
        self._noted: dict[ObjectKey, float] = {}
        self._merged: dict[ObjectKey, float] = {}
        self._read: set[str] = set()

    def note(self, keys: Iterable[ObjectKey]) -> None:
        """Note that objects are used now."""
        now = self._now()
        with self._lock:
            self._noted.update(dict.fromkeys(keys, now))

    def write_down_if_due(self) -> None:
        """Write down what was noted, unless it is little and was done a moment ago.

        Raises:
            OSError: the medium failed; the next call writes it.
        """
        if len(self._noted) >= _WRITTEN_AT or self._clock() - self._written_seconds >= WRITTEN_AFTER_SECONDS:
            self.write_down()

    def write_down(self) -> None:
        """Write down what was noted since the last time.

        Raises:
            OSError: the medium failed; the next call writes it.
        """
        with self._lock:
            noted, self._noted = self._noted, {}
        try:
            self._write(noted)
        except OSError:
            with self._lock:
                self._noted = {**noted, **self._noted}
            raise
        self._written_seconds = self._clock()

    def merge_if_due(self) -> None:
        """Merge, unless that was done a moment ago: records must not become many while nothing is evicted.

        Raises:
            OSError: the medium failed.
        """
        if self._clock() - self._merged_seconds >= _MERGED_AFTER_SECONDS:
            self.merge()

    def merge(self) -> dict[ObjectKey, float]:
        """Return when objects were used last, in seconds since the epoch, as far as that was written down.

        Many records become one.

        Raises:
            OSError: the medium failed.
        """
        self._merged_seconds = self._clock()
        names = self._small.names(FOLDER)
        for name in names:
            if name not in self._read:
                for key, used in self._read_one(name).items():
                    self._merged[key] = max(used, self._merged.get(key, 0.0))
                self._read.add(name)
        self._read.intersection_update(names)
        if len(self._merged) > _MOST_KEPT:
            latest = sorted(self._merged.items(), key=lambda item: item[1])[-_MOST_KEPT:]
            self._merged = dict(latest)
        if len(names) >= _MERGED_AT:
            self._write(self._merged)
            self._small.delete([f"{FOLDER}/{name}" for name in names])
        return self._merged

    def keep_only(self, there: set[ObjectKey]) -> None:
        """Forget the uses of what is not among ``there``."""
        self._merged = {key: used for key, used in self._merged.items() if key in there}

    def forget(self) -> None:
        """Forget what was merged: another process does that now."""
        self._merged, self._read = {}, set()

    def _write(self, uses: dict[ObjectKey, float]) -> None:
        if uses:
            body = zlib.compress(json.dumps({key.path: used for key, used in uses.items()}).encode(), 1)
            self._small.write(f"{FOLDER}/{secrets.token_hex(8)}", body)

    def _read_one(self, name: str) -> dict[ObjectKey, float]:
        content = self._small.read(f"{FOLDER}/{name}")
        if content is None:
            return {}
        try:
            return {parse_key(path): float(used) for path, used in json.loads(zlib.decompress(content)).items()}
        except (zlib.error, ValueError) as error:
            logger.warning("%s/%s is damaged and passed over: %s", FOLDER, name, error)
            return {}
