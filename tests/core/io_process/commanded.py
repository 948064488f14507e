"""A backend in the I/O process that a test commands through a folder: its calls hang, fail and forget as told.

The test's side is :class:`tests.core.io_process.border_rig.Medium`. The names of the folder's files are here.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from offload_core.api import (
    Backend,
    BackendContext,
    BackendOptions,
    BackendType,
    Capabilities,
    LoadOutcome,
    ObjectKey,
    StoreOutcome,
    hookimpl,
)

OFFLOAD_API_VERSION = 1

OBJECTS = "objects"
"""Folder of the objects; the name of each is its number."""
LOG = "log"
"""The backend adds a line for each begin and each end of work on a thread: process id, number, call, objects, step."""
EVERY_PROCESS = "every process"
"""In a gate's file, in the place of the process id."""
SLOW = "slow"
"""While this file exists, copies pause in the middle."""
FORKED = "forked"
"""While this file exists, each load runs in a fork of the process."""
FORK = "-fork"
"""The end of the name of work in a fork. Before it stands the name of the call that has forked."""
ERROR, CANCELLATION, EXIT = "an error", "a cancellation", "an exit"

_POLL_SECONDS = 0.001
_SLOW_SECONDS = 0.002
_FORK_SECONDS = 0.05


def gate_file(folder: Path, call: str) -> Path:
    """The file that names the process whose calls of this kind wait."""
    return folder / f"gate-{call}"


def fault_file(folder: Path, call: str) -> Path:
    """The file with the fault of the calls of this kind. An exit removes it."""
    return folder / f"fault-{call}"


class CommandedOptions(BackendOptions):
    path: str


class Commanded(Backend[CommandedOptions]):
    capabilities = Capabilities(medium="disk", persistent=True, shared=True)

    def __init__(self, options: CommandedOptions, context: BackendContext) -> None:
        super().__init__(options, context)
        self._folder = Path(options.path)
        self._numbers = itertools.count()
        self._log = -1

    async def open(self) -> None:
        self._log = os.open(self._folder / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)

    async def contains(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        return await self.run_blocking(lambda: [self._object(key).exists() for key in keys])

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        outcomes = await self.run_blocking(self._load, keys, buffers)
        self._cancel("load")
        return outcomes

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        await self.run_blocking(self._store, keys, buffers)
        self._cancel("store")
        return [StoreOutcome.STORED] * len(keys)

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            self._object(key).unlink(missing_ok=True)

    def _load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        with self._call("load", len(keys)) as name:
            if not (self._folder / FORKED).exists():
                return [self._load_one(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]
            if (child := os.fork()) == 0:
                self._load_and_exit(name + FORK, keys, buffers)
            _, status = os.waitpid(child, 0)
            return [LoadOutcome.HIT if status == 0 else LoadOutcome.MISS] * len(keys)

    def _load_and_exit(self, name: str, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> NoReturn:
        """Load in a fork, whose work has lines of its own in the log. It may outlive the process."""
        line = f"{os.getpid()} {name} load {len(keys)}"
        outcomes = []
        try:
            os.write(self._log, f"{line} begin\n".encode())
            time.sleep(_FORK_SECONDS)
            outcomes = [self._load_one(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]
            os.write(self._log, f"{line} end\n".encode())
        finally:
            os._exit(outcomes != [LoadOutcome.HIT] * len(keys))

    def _load_one(self, key: ObjectKey, buffer: memoryview) -> LoadOutcome:
        try:
            content = self._object(key).read_bytes()
        except FileNotFoundError:
            return LoadOutcome.MISS
        half = len(buffer) // 2
        buffer[:half] = content[:half]
        self._pause()
        buffer[half:] = content[half:]
        return LoadOutcome.HIT

    def _store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> None:
        with self._call("store", len(keys)) as name:
            for key, buffer in zip(keys, buffers, strict=True):
                half = len(buffer) // 2
                content = bytes(buffer[:half])
                self._pause()
                part = self._folder / name  # an exit in the middle leaves no torn object
                part.write_bytes(content + bytes(buffer[half:]))
                part.rename(self._object(key))

    @contextmanager
    def _call(self, call: str, objects: int) -> Iterator[str]:
        """Note the begin and the end of work on a thread, and hang or fail as told."""
        name = f"{os.getpid()}-{next(self._numbers)}"
        line = f"{os.getpid()} {name} {call} {objects}"
        os.write(self._log, f"{line} begin\n".encode())
        try:
            while self._is_shut(call):
                time.sleep(_POLL_SECONDS)
            fault = self._fault(call)
            if fault == ERROR:
                raise OSError("gone")
            if fault == EXIT:
                fault_file(self._folder, call).unlink(missing_ok=True)
                os._exit(3)
            yield name
        finally:
            os.write(self._log, f"{line} end\n".encode())

    def _is_shut(self, call: str) -> bool:
        try:
            return gate_file(self._folder, call).read_text() in (str(os.getpid()), EVERY_PROCESS)
        except FileNotFoundError:
            return False

    def _fault(self, call: str) -> str | None:
        try:
            return fault_file(self._folder, call).read_text()
        except FileNotFoundError:
            return None

    def _cancel(self, call: str) -> None:
        if self._fault(call) == CANCELLATION:
            raise asyncio.CancelledError

    def _pause(self) -> None:
        if (self._folder / SLOW).exists():
            time.sleep(_SLOW_SECONDS)

    def _object(self, key: ObjectKey) -> Path:
        return self._folder / OBJECTS / str(int.from_bytes(key.chunk_hash, "big"))


@hookimpl
def offload_register_backends() -> list[BackendType]:
    return [BackendType("commanded", Commanded, CommandedOptions)]
