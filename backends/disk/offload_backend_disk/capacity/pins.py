"""Pins: no process evicts an object while any process loads it.

A pin is a shared lock on one byte of a file; the key gives the byte's position. To evict an object, a process locks its
byte exclusively for as long as the eviction takes. The kernel releases a process's locks when the process ends, so no
pin outlives it. The locks are Linux's open file description locks (fcntl(2), F_OFD_SETLK), which also keep two backends
of one process apart. No call here waits.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from offload_backend_disk.folder.control_files import close_control_file, open_control_file
from offload_core.api import ObjectKey, TierLogger

_LOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux: type, whence, start, length, process


class Pins:
    """The pins of one folder, as one process sees them.

    Args:
        path: the file with the locked bytes; created if it is missing, and always empty.
    """

    def __init__(self, path: Path, log: TierLogger) -> None:
        self._path = path
        self._log = log
        self._lock = threading.Lock()
        self._counts: dict[ObjectKey, int] = {}
        self._pin_descriptor = -1
        self._evict_descriptor = -1

    def open(self) -> None:
        """Open the file, or open it again after it was removed. Pinned objects stay pinned.

        Raises:
            OSError: the folder cannot be written. A file that was open before stays open.
        """
        with self._lock:
            pin_descriptor = open_control_file(self._path, self._log, os.O_RDWR)
            try:
                evict_descriptor = open_control_file(self._path, self._log, os.O_RDWR)
            except BaseException:
                close_control_file(pin_descriptor)
                raise
            self._close()
            self._pin_descriptor, self._evict_descriptor = pin_descriptor, evict_descriptor
            for key in self._counts:
                _set_lock(self._pin_descriptor, fcntl.F_RDLCK, key)

    def close(self) -> None:
        """Release all pins and close the file. Idempotent."""
        with self._lock:
            self._close()
            self._counts.clear()

    def pin(self, keys: Sequence[ObjectKey], size_of: Callable[[ObjectKey], int | None]) -> list[int | None]:
        """Pin the objects that are present: no process evicts one until :meth:`unpin` was called as often.

        Args:
            size_of: returns an object's bytes, ``None`` if it is absent; called when the object is safe from eviction.

        Returns:
            The bytes of each object, which is now pinned, or ``None`` if it is absent.
        """
        return [self._pin(key, size_of) for key in keys]

    def unpin(self, keys: Iterable[ObjectKey]) -> None:
        """Undo :meth:`pin` for the keys that it found present."""
        with self._lock:
            for key in keys:
                if key in self._counts:  # else closed meanwhile
                    self._unpin(key)

    @contextmanager
    def keep_unpinned(self, key: ObjectKey) -> Iterator[bool]:
        """Keep every process from pinning ``key`` meanwhile. Yields ``False`` if it is pinned. One thread at a time."""
        if not _set_lock(self._evict_descriptor, fcntl.F_WRLCK, key):
            yield False
            return
        try:
            yield True
        finally:
            _set_lock(self._evict_descriptor, fcntl.F_UNLCK, key)

    def is_unpinned(self, key: ObjectKey) -> bool:
        """Return whether no process has ``key`` pinned right now. One thread at a time."""
        with self.keep_unpinned(key) as unpinned:
            return unpinned

    def is_pinned_here(self, key: ObjectKey) -> bool:
        """Return whether this process has ``key`` pinned right now."""
        with self._lock:
            return key in self._counts

    def _pin(self, key: ObjectKey, size_of: Callable[[ObjectKey], int | None]) -> int | None:
        with self._lock:
            if key not in self._counts and not _set_lock(self._pin_descriptor, fcntl.F_RDLCK, key):
                return None  # a process evicts it right now
            self._counts[key] = self._counts.get(key, 0) + 1
        nbytes: int | None = None
        try:
            nbytes = size_of(key)  # without the lock: a disk that hangs here must not hang the event loop in unpin()
        finally:
            if nbytes is None:
                self.unpin([key])
        return nbytes

    def _unpin(self, key: ObjectKey) -> None:
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]
            _set_lock(self._pin_descriptor, fcntl.F_UNLCK, key)

    def _close(self) -> None:
        descriptors = self._pin_descriptor, self._evict_descriptor
        self._pin_descriptor = self._evict_descriptor = -1
        for descriptor in descriptors:
            close_control_file(descriptor)


def _set_lock(descriptor: int, kind: int, key: ObjectKey) -> bool:
    """Lock or unlock the byte of ``key``; return ``False`` if another process's lock forbids it."""
    digest = blake2b(f"{key.namespace}/{key.pack}/".encode() + key.chunk_hash, digest_size=8).digest()
    position = int.from_bytes(digest, "little") >> 2
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, position, 1, 0))
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES; POSIX allows both
        return False
    return True
