"""Pins: what is being loaded is not evicted, whichever process would evict it.

A pin is a shared lock on one byte of a file, at a place that the key gives; who evicts takes the byte for itself
alone, for as long as that takes. The kernel lets go of a process's locks when it ends, so no pin outlives its process.
The locks are Linux's open file description locks (fcntl(2), F_OFD_SETLK), which also keep two backends of one process
apart. Nothing here waits.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

from offload_core.api import ObjectKey

_LOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux: type, whence, start, length, process


class Pins:
    """The pins of one folder, as one process sees them.

    Args:
        path: the file to lock bytes of; made when it is missing, and always empty.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._counts: dict[ObjectKey, int] = {}
        self._pinning = -1
        self._evicting = -1

    def open(self) -> None:
        """Open the file, again where it was removed: what is pinned stays pinned.

        Raises:
            OSError: the folder cannot be written.
        """
        with self._lock:
            self._close()
            self._pinning = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._evicting = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            for key in self._counts:
                _set(self._pinning, fcntl.F_RDLCK, key)

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        with self._lock:
            self._close()
            self._counts.clear()

    def pin(self, keys: Sequence[ObjectKey], size_of: Callable[[ObjectKey], int | None]) -> list[int | None]:
        """Keep everybody from evicting objects, until as many :meth:`unpin`.

        Args:
            size_of: an object's bytes, ``None`` where none is; it is asked when nobody can evict the object any more.

        Returns:
            Per key the bytes of its object, which is pinned, or ``None`` where none is there.
        """
        return [self._pin(key, size_of) for key in keys]

    def unpin(self, keys: Iterable[ObjectKey]) -> None:
        """Undo :meth:`pin`, for keys of which it said that they are there."""
        with self._lock:
            for key in keys:
                if key in self._counts:  # else closed meanwhile
                    self._release(key)

    @contextmanager
    def without(self, key: ObjectKey) -> Iterator[bool]:
        """Keep everybody from pinning ``key`` meanwhile; gives whether nobody has. One thread at a time."""
        if not _set(self._evicting, fcntl.F_WRLCK, key):
            yield False
            return
        try:
            yield True
        finally:
            _set(self._evicting, fcntl.F_UNLCK, key)

    def is_free(self, key: ObjectKey) -> bool:
        """Return whether nobody has pinned ``key`` right now. One thread at a time."""
        with self.without(key) as free:
            return free

    def _pin(self, key: ObjectKey, size_of: Callable[[ObjectKey], int | None]) -> int | None:
        with self._lock:
            if key not in self._counts and not _set(self._pinning, fcntl.F_RDLCK, key):
                return None  # somebody evicts it right now
            self._counts[key] = self._counts.get(key, 0) + 1
        nbytes: int | None = None
        try:
            nbytes = size_of(key)  # not under the lock, for which the event loop waits: a hung disk may take for ever
        finally:
            if nbytes is None:
                self.unpin([key])
        return nbytes

    def _release(self, key: ObjectKey) -> None:
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]
            _set(self._pinning, fcntl.F_UNLCK, key)

    def _close(self) -> None:
        descriptors = self._pinning, self._evicting
        self._pinning = self._evicting = -1  # first: a close that fails has closed, and the number is another file's
        for descriptor in descriptors:
            if descriptor >= 0:
                with suppress(OSError):  # on a mount that is gone even that is an error
                    os.close(descriptor)


def _set(descriptor: int, kind: int, key: ObjectKey) -> bool:
    """Lock or unlock the byte of ``key``; returns whether nobody else's lock is in the way."""
    digest = blake2b(f"{key.namespace}/{key.pack}/".encode() + key.chunk_hash, digest_size=8).digest()
    place = int.from_bytes(digest, "little") >> 2
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, place, 1, 0))
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, as the system likes
        return False
    return True
