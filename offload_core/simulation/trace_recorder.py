"""Records the prompts of an engine as a trace (:mod:`offload_core.simulation.trace`), without their content.

An id is made of the chunk's hash and a random salt, which exists in memory only. So a trace shows which prompts share a
prefix, and nobody can find a guessed text in it. Ids of different files have nothing in common.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Sequence
from io import FileIO
from itertools import count
from pathlib import Path

from offload_core.runtime.threads import CallLimit, DaemonExecutor
from offload_core.simulation.trace import FORMAT, VERSION

logger = logging.getLogger(__name__)

_ID_BITS = 53
"""Every JSON reader knows integers of this size exactly."""
_MAX_WAITING = 1000
"""Lines that may wait for the disk."""
_CLOSE_SECONDS = 1.0
_FILE_MODE = 0o600


class TraceRecorder:
    """Writes one line per request to a new file. A thread of its own writes; an error or a hung disk stops no request.

    If the file exists, the next free name is used: ``trace-2.jsonl`` after ``trace.jsonl``.

    Args:
        path: the file, in an existing folder.
        block_tokens: tokens per id.
        max_bytes: the file gets no line that would exceed this size.
    """

    def __init__(self, path: Path, block_tokens: int, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._salt = secrets.token_bytes(16)
        self._began = time.monotonic()
        self._file: FileIO | None = None
        self._nbytes = 0
        self._ended = False
        self._limit = CallLimit(_MAX_WAITING)
        self._executor = DaemonExecutor(1, "offload-trace")
        header = {"format": FORMAT, "version": VERSION, "block_tokens": block_tokens}
        try:
            self._executor.submit(self._open, header)
        except RuntimeError as error:
            self._give_up(str(error))

    def record(self, arrived: float, input_tokens: int, output_tokens: int, hashes: Sequence[bytes]) -> None:
        """Record a request that has ended. Never waits; without a place among the waiting lines, the line is dropped.

        Args:
            arrived: by the monotonic clock, in seconds.
            hashes: of the whole blocks of its prompt, in order.
        """
        if not self._ended:
            self._limit.submit(self._executor, self._write, arrived, input_tokens, output_tokens, hashes)

    def close(self) -> None:
        """Wait for the waiting lines, at most a second, and close the file. Idempotent."""
        if not self._ended:
            self._ended = True
            closing = self._executor.submit(self._close)
            with contextlib.suppress(TimeoutError):
                closing.result(_CLOSE_SECONDS)
        self._executor.shutdown()

    def _open(self, header: dict[str, object]) -> None:
        for number in count(1):
            path = self._path if number == 1 else self._path.with_stem(f"{self._path.stem}-{number}")
            try:
                self._file = FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE), "wb")
                break
            except FileExistsError:
                continue
            except (OSError, ValueError) as error:  # ValueError: the text is not a path
                self._give_up(f"{str(path)!r} could not be created ({error})")
                return
        self._append(header)

    def _write(self, arrived: float, input_tokens: int, output_tokens: int, hashes: Sequence[bytes]) -> None:
        self._append(
            {
                "timestamp": max(0, round(1000 * (arrived - self._began))),
                "input_length": input_tokens,
                "output_length": output_tokens,
                "hash_ids": [self._id(chunk_hash) for chunk_hash in hashes],
            }
        )

    def _append(self, content: dict[str, object]) -> None:
        if self._file is None:
            return
        line = json.dumps(content, separators=(",", ":")).encode() + b"\n"
        try:
            if self._nbytes + len(line) > self._max_bytes:
                self._give_up(f"it has reached its limit of {self._max_bytes} bytes (trace_file_bytes)")
                return
            written = 0
            while written < len(line):  # a full disk may take a part, and then refuse the rest
                written += self._file.write(line[written:])
            self._nbytes += len(line)
        except OSError as error:
            with contextlib.suppress(OSError):  # no reader takes half a line
                self._file.truncate(self._nbytes)
            self._give_up(f"it could not be written ({error})")

    def _id(self, chunk_hash: bytes) -> int:
        digest = hashlib.blake2b(chunk_hash, digest_size=8, key=self._salt).digest()
        return int.from_bytes(digest, "big") >> (64 - _ID_BITS)

    def _give_up(self, reason: str) -> None:
        logger.warning("trace_file: %s; nothing more is recorded, and the engine runs on", reason)
        self._ended = True
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
