"""Shared storage behind fsspec: object stores, whose put is atomic, and servers that rename.

fsspec's listing cache is off (whoever opens the file system says so), and nothing here lists but :meth:`entries`.
"""

from __future__ import annotations

import asyncio
import datetime
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
from fsspec.asyn import AsyncFileSystem, sync

from offload_backend_nfs.storage import temporaries as owners
from offload_backend_nfs.storage.base import TEMPORARY_FOLDER, TEMPORARY_LIFE_SECONDS, Entry, Medium
from offload_core.api import LoadOutcome

AT_ONCE = 64
"""Small requests that one call has on their way together."""
_TIMES = ("LastModified", "mtime", "last_modified", "updated", "timeModified", "created")
"""What file systems call the time of an object, the first that is there."""

_creating = threading.Lock()


class ObjectStore(Medium):
    """A prefix of an object store where a put is atomic.

    Args:
        fs: an fsspec file system of this medium's own, whose caches are off.
        root: the prefix, as ``fs`` takes it.
    """

    lookup_batch = 256

    def __init__(self, fs: Any, root: str) -> None:
        self._fs = fs
        self._root = root.rstrip("/")

    def open(self) -> None:
        """See :meth:`Medium.open`: the bucket must be there, the prefix need not."""
        bucket = self._root.strip("/").partition("/")[0]
        if self._fs.protocol != "memory":
            try:
                self._fs.info(bucket)
            except FileNotFoundError as error:
                raise self._no_bucket(bucket) from error

    def close(self) -> None:
        """See :meth:`Medium.close`; fsspec ends the connections with the file system."""

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """See :meth:`Medium.sizes`; many at once where ``fs`` is asynchronous."""
        if isinstance(self._fs, AsyncFileSystem):
            return list(self._at_once([self._size_soon(name) for name in names]))
        return [self._size(name) for name in names]

    def load(self, name: str, buffer: memoryview) -> LoadOutcome:
        """See :meth:`Medium.load`."""
        data = self._fetch(name, len(buffer))
        if data is None:
            return LoadOutcome.MISS
        if len(data) != len(buffer):
            return LoadOutcome.CORRUPT
        _copy_into(buffer, data)
        return LoadOutcome.HIT

    def _fetch(self, name: str, nbytes: int) -> bytes | None:
        """Return an object, ``None`` where none is; anything of another size where it has not ``nbytes``."""
        return self.read_small(name)

    def store(self, name: str, buffer: memoryview) -> None:
        """See :meth:`Medium.store`."""
        self._fs.pipe_file(self._path(name), bytes(buffer))

    def create(self, name: str, data: bytes) -> bool:
        """See :meth:`Medium.create`."""
        # Only file systems with a server behind them decide by themselves who comes first.
        deciding = nullcontext() if isinstance(self._fs, AsyncFileSystem) else _creating
        try:
            with deciding:
                self._fs.pipe_file(self._path(name), data, mode="create")
        except FileExistsError:
            return False
        return True

    def delete(self, names: Sequence[str]) -> None:
        """See :meth:`Medium.delete`."""
        if isinstance(self._fs, AsyncFileSystem):
            self._at_once([self._delete_soon(name) for name in names])
            return
        for name in names:
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name))

    def entries(self, folder: str) -> list[Entry]:
        """See :meth:`Medium.entries`."""
        return [entry for entry in self._entries(folder) if not entry.name.startswith(".")]

    def read_small(self, name: str) -> bytes | None:
        """See :meth:`Medium.read_small`."""
        try:
            return bytes(self._fs.cat_file(self._path(name)))
        except FileNotFoundError:
            return None

    def _entries(self, folder: str) -> list[Entry]:
        path = self._path(folder)
        try:
            listed = self._fs.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = [(found["name"].rstrip("/").rpartition("/")[2], found) for found in listed]
        return [
            Entry(name, found["type"] == "directory", int(found.get("size") or 0), _time_of(found))
            for name, found in names
            if name and found["name"].strip("/") != path.strip("/")  # the mark of an empty folder
        ]

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _size(self, name: str) -> int | None:
        try:
            found = self._fs.info(self._path(name))
        except FileNotFoundError:
            return None
        return int(found["size"]) if found["type"] == "file" else None

    async def _size_soon(self, name: str) -> int | None:
        """Return the size, on fsspec's loop. Cancellation has no effect on the medium."""
        try:
            found = await self._fs._info(self._path(name))
        except FileNotFoundError:
            return None
        return int(found["size"]) if found["type"] == "file" else None

    async def _delete_soon(self, name: str) -> None:
        """Delete, on fsspec's loop. Cancelled, it may have happened or not."""
        with suppress(FileNotFoundError):
            await self._fs._rm_file(self._path(name))

    def _at_once(self, requests: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Run requests on fsspec's loop, at most ``AT_ONCE`` at a time; raise the first error after all have ended."""
        done: list[Any] = sync(self._fs.loop, _gather, requests)
        for result in done:
            if isinstance(result, BaseException):
                raise result
        return done

    def _no_bucket(self, bucket: str) -> FileNotFoundError:
        return FileNotFoundError(2, "there is no such bucket, or this account cannot see it; create it", bucket)


class RenamingStore(ObjectStore):
    """A server whose files appear while they are written: under a temporary name first, then renamed."""

    def open(self) -> None:
        """See :meth:`Medium.open`."""
        self._fs.makedirs(self._path(TEMPORARY_FOLDER), exist_ok=True)

    def store(self, name: str, buffer: memoryview) -> None:
        """See :meth:`Medium.store`."""
        path = self._path(name)
        temporary = self._path(f"{TEMPORARY_FOLDER}/{owners.temporary_name()}")
        try:
            self._fs.pipe_file(temporary, bytes(buffer))
            try:
                self._fs.mv(temporary, path)
            except FileNotFoundError:
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._fs.mv(temporary, path)
        except BaseException:
            with suppress(Exception):
                self._fs.rm_file(temporary)
            raise

    def create(self, name: str, data: bytes) -> bool:
        """See :meth:`Medium.create`; as far as the server opens files exclusively."""
        path = self._path(name)
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        try:
            with self._fs.open(path, "xb") as file:
                file.write(data)
        except FileExistsError:
            return False
        return True

    def store_new(self, name: str, buffer: memoryview) -> bool:
        """See :meth:`Medium.store_new`; of several at the same moment, each may be told ``True``."""
        if self.sizes([name]) != [None]:
            return False
        self.store(name, buffer)
        return True

    def sweep(self, stopped: Callable[[], bool]) -> int:
        """See :meth:`Medium.sweep`."""
        count = 0
        oldest = time.time() - TEMPORARY_LIFE_SECONDS
        for entry in self._entries(TEMPORARY_FOLDER):
            if stopped():
                break
            if owners.is_temporary(entry.name) and (entry.modified_seconds < oldest or owners.is_dead(entry.name)):
                self.delete([f"{TEMPORARY_FOLDER}/{entry.name}"])
                count += 1
        return count


def _copy_into(buffer: memoryview, data: bytes) -> None:
    """Copy an object into a buffer of its size; numpy lets other threads run meanwhile (C8), a slice would not."""
    np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(data, np.uint8))


async def _gather(requests: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Await all requests; errors are among the results. Cancellation goes through to them."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(request: Coroutine[Any, Any, Any]) -> Any:
        async with slots:
            return await request

    return await asyncio.gather(*map(one, requests), return_exceptions=True)


def _time_of(found: dict[str, Any]) -> float:
    """Return when an object was stored; now where the server does not say, so that nothing goes for its age."""
    for key in _TIMES:
        value = found.get(key)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, str) and value:
            with suppress(ValueError):
                return datetime.datetime.fromisoformat(value).timestamp()
        if isinstance(value, int | float):
            return float(value)
    return time.time()
