"""Contender of ``benchmarks/backends.py``: a plain loop that moves and checks objects, with no framework around it.

Its processor time is the floor for our tiers, since checked objects cannot be moved with less work in Python.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from benchmarks.backends_rig import CHUNK_BYTES, Memory, PlainThreads
from offload_core.api import preallocate
from offload_core.objects.format import HEADER_BYTES, checksum

STEP_BYTES = 256 * 1024
"""Bytes that are read and then hashed at once: they fit into the processor's cache."""


class PlainLoop(PlainThreads):
    """Loop over files of one object each: a header of 4 KiB with the payload's XXH3-128, and the payload.

    Each thread has its own part of the files. A store hashes the payload, writes a temporary file and renames it. Like
    our tiers, it allocates the file's space first. A load reads and hashes in steps, and compares the hash with the
    header's.
    """

    def __init__(
        self, name: str, memory: Memory, chunks: int, threads: int, folder: Path, block_bytes: int, direct: bool
    ) -> None:
        super().__init__(name, memory, chunks, threads)
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._threads = threads
        self._flags = os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self._blocks = [
            view[start : start + block_bytes] for view in self._views for start in range(0, CHUNK_BYTES, block_bytes)
        ]
        headers = memory.pool.memory[self.nbytes : self.nbytes + threads * HEADER_BYTES]
        self._headers = [headers[start : start + HEADER_BYTES] for start in range(0, len(headers), HEADER_BYTES)]

    def _paths(self, number: int) -> list[str]:
        names = [hashlib.sha256(b"%d/%d" % (number, index)).hexdigest() for index in range(len(self._blocks))]
        for prefix in {name[:2] for name in names}:
            (self._folder / prefix).mkdir(exist_ok=True)
        return [f"{self._folder}/{name[:2]}/{name}.kv" for name in names]

    def _calls(self, work: Callable[..., Any], number: int) -> list[Callable[[], Any]]:
        paths = self._paths(number)
        return [
            partial(work, self._headers[thread], paths[thread :: self._threads], self._blocks[thread :: self._threads])
            for thread in range(self._threads)
        ]

    def _store_calls(self, number: int) -> list[Callable[[], Any]]:
        return self._calls(self._store_files, number)

    def _load_calls(self, number: int) -> list[Callable[[], Any]]:
        return self._calls(self._load_files, number)

    def _store_files(self, header: memoryview, paths: Sequence[str], blocks: Sequence[memoryview]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._flags
        for path, block in zip(paths, blocks, strict=True):
            header[:16] = checksum(block)
            descriptor = os.open(f"{path}.tmp", flags, 0o600)
            try:
                if not self._flags & os.O_DIRECT:  # as our tiers do
                    preallocate(descriptor, len(header) + len(block))
                os.pwritev(descriptor, [header, block], 0)
            finally:
                os.close(descriptor)
            os.rename(f"{path}.tmp", path)  # noqa: PTH104

    def _load_files(self, header: memoryview, paths: Sequence[str], blocks: Sequence[memoryview]) -> None:
        for path, block in zip(paths, blocks, strict=True):
            digest = xxhash.xxh3_128()
            descriptor = os.open(path, os.O_RDONLY | self._flags)
            try:
                for start in range(0, len(block), STEP_BYTES):
                    step = block[start : start + STEP_BYTES]
                    if start:
                        os.preadv(descriptor, [step], HEADER_BYTES + start)
                    else:
                        os.preadv(descriptor, [header, step], 0)
                    digest.update(step)
            finally:
                os.close(descriptor)
            if digest.digest() != header[:16]:
                raise SystemExit(f"{self.name}: {path} has other bytes than were stored")

    def clean(self, number: int) -> None:
        for path in self._paths(number):
            Path(path).unlink()
