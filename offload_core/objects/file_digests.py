"""Digests of files by their content: read on several threads, or taken from an earlier start."""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import contextmanager
from pathlib import Path

import xxhash

from offload_core.objects.kept_digests import FileState, KeptDigests, user_cache_folder
from offload_core.runtime.threads import DaemonExecutor

logger = logging.getLogger(__name__)

_THREADS = 8
_READ_BYTES = 8 * 1024 * 1024
_ATTEMPTS = 3
_GB = 1_000_000_000


class FileDigests:
    """Computes the XXH3-128 of files, each only once per host and content.

    Args:
        folder: the folder of the kept digests; ``None`` keeps none.
        settled_seconds: age of a file's last change from which its digest is kept. It is longer than any tick of a
            file system's clock, and than the delay of times that are written late.
        progress_bytes: amount to read from which the log shows the progress.
        progress_seconds: interval of the progress, and of keeping the digests that are ready.
    """

    def __init__(
        self,
        folder: Path | None,
        settled_seconds: float = 60.0,
        progress_bytes: int = 10 * _GB,
        progress_seconds: float = 10.0,
    ) -> None:
        self._kept = KeptDigests(folder)
        self._settled_seconds = settled_seconds
        self._progress_bytes = progress_bytes
        self._progress_seconds = progress_seconds

    @staticmethod
    def of_user() -> FileDigests:
        """Return the digests that are kept in this user's cache folder."""
        return FileDigests(user_cache_folder())

    def of(self, paths: Collection[Path]) -> dict[Path, str]:
        """Return the digest of each file. A file in a state that was read before is opened, but not read.

        Raises:
            OSError: a file cannot be read, is no regular file, or keeps changing.
        """
        self._kept.load()
        digests: dict[Path, str] = {}
        unread: dict[Path, int] = {}
        for path in paths:
            with _opened(path) as (_, status):
                digest = self._kept.get(FileState.of(status))
            if digest is None:
                unread[path] = status.st_size
            else:
                digests[path] = digest
        if unread:
            digests.update(self._read(unread))
        return digests

    def _read(self, sizes: dict[Path, int]) -> dict[Path, str]:
        reading = _Reading(sum(sizes.values()))
        shown = reading.total_bytes >= self._progress_bytes
        if shown:
            reading.show()
        threads = DaemonExecutor(min(_THREADS, len(sizes)), "offload-digests")
        largest_first = sorted(sizes, key=lambda path: sizes[path], reverse=True)
        futures = {threads.submit(reading.digest, path): path for path in largest_first}
        digests: dict[Path, str] = {}
        pending = set(futures)
        try:
            while pending:
                ended, pending = wait(pending, self._progress_seconds, FIRST_EXCEPTION)
                settled: dict[FileState, str] = {}
                for future in ended:
                    digest, state, began_ns = future.result()
                    digests[futures[future]] = digest
                    if state.settled(began_ns, self._settled_seconds):
                        settled[state] = digest
                self._kept.add(settled)  # not only at the end: the engine may be killed before
                if shown:
                    reading.show()
        finally:
            reading.stop()
            threads.shutdown()
        return digests


class _Reading:
    """Files that threads are reading."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._began = time.monotonic()
        self._done_bytes = 0
        self._lock = threading.Lock()
        self._stopped = False

    def stop(self) -> None:
        """End all reading."""
        self._stopped = True

    def show(self) -> None:
        """Log the amount that was read, and the time that is left, such as ``120 of 700 GB, 45 s left``."""
        done, seconds = self._done_bytes, time.monotonic() - self._began
        left = f", {max(0, self.total_bytes - done) * seconds / done:.0f} s left" if done else ""
        amounts = f"{done / _GB:.0f} of {self.total_bytes / _GB:.0f} GB"
        logger.info("reading model files for the cache's identity: %s%s", amounts, left)

    def digest(self, path: Path) -> tuple[str, FileState, int]:
        """Return a file's digest, the state of the file, and the time at which the reading began, in nanoseconds."""
        for _ in range(_ATTEMPTS):
            began_ns = time.time_ns()
            with _opened(path) as (descriptor, status):
                digest = self._digest(descriptor)
                state = FileState.of(status)
                if state == FileState.of(os.fstat(descriptor)):
                    return f"xxh3:{digest}", state, began_ns
        raise OSError(f"{path} changes while it is read")

    def _digest(self, descriptor: int) -> str:
        digest = xxhash.xxh3_128()
        buffer = memoryview(bytearray(_READ_BYTES))
        while count := os.readv(descriptor, [buffer]):
            if self._stopped:
                raise InterruptedError("the reading was stopped")
            digest.update(buffer[:count])  # releases the interpreter lock
            with self._lock:
                self._done_bytes += count
        return digest.hexdigest()


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """Open a regular file; the opening never waits, and brings the times of a file on NFS up to date."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is no regular file any more")
        yield descriptor, status
    finally:
        os.close(descriptor)
