"""A file through which the copies of one fault script follow each other, each in its own process.

A script wraps backends where they run. With an I/O process, that is not the process of the test. Lines are appended in
one write each, and every process reads the lines of all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path


class ScriptJournal:
    """One process's view of the file. Not thread-safe.

    Args:
        path: the file, which is made if it is missing.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._read_bytes = 0

    def add(self, *words: str | int | None) -> None:
        """Append a line."""
        os.write(self._descriptor, json.dumps(words).encode() + b"\n")

    def new_lines(self) -> Iterator[list[str | int | None]]:
        """Yield the lines since the last call, those of this process too."""
        size = os.fstat(self._descriptor).st_size
        if size == self._read_bytes:
            return
        data = os.pread(self._descriptor, size - self._read_bytes, self._read_bytes)
        whole, _, _ = data.rpartition(b"\n")
        self._read_bytes += len(whole) + 1 if whole else 0
        for line in whole.splitlines():
            words: list[str | int | None] = json.loads(line)
            yield words
