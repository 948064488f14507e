"""Shared storage behind fsspec: object stores with an atomic put, and servers that need a rename.

The caller opens the file system without fsspec's listing cache. Only :meth:`ObjectStore.entries` lists folders.
"""

from __future__ import annotations

import asyncio
import datetime
import errno
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
from fsspec.asyn import AsyncFileSystem, sync

from offload_backend_nfs.storage import temporaries
from offload_backend_nfs.storage.base import (
    MAX_SMALL_BYTES,
    TEMPORARY_FOLDER,
    Entry,
    Medium,
)
from offload_backend_nfs.storage.failures import DeletionErrors, ForeignFileError
from offload_backend_nfs.storage.retry import is_transient
from offload_core.api import CHECK_BYTES, LoadCheck, LoadOutcome, StoreSeal

MAX_CONCURRENT_REQUESTS = 64
"""The most small requests of one call that run at the same time."""
_TIME_FIELDS = ("LastModified", "mtime", "last_modified", "updated", "timeModified", "created")
"""The fields in which file systems give an object's time. The first one present counts."""

_create_lock = threading.Lock()


class ObjectStore(Medium):
    """A prefix of an object store with an atomic put.

    Args:
        fs: an fsspec file system that no other code uses, with its caches off.
        root: the prefix, as ``fs`` expects it.
    """

    lookup_batch = 256

    def __init__(self, fs: Any, root: str) -> None:
        self._fs = fs
        self._root = root.rstrip("/")
        if isinstance(fs, AsyncFileSystem) and fs.loop.get_exception_handler() is None:  # fsspec's other users' first
            fs.loop.call_soon_threadsafe(fs.loop.set_exception_handler, _handle_lost_error)

    def open(self) -> None:
        """See :meth:`Medium.open`. The bucket must exist; the prefix need not."""
        bucket = self._root.strip("/").partition("/")[0]
        if self._fs.protocol != "memory":
            try:
                self._fs.info(bucket)
            except FileNotFoundError as error:
                raise self._no_bucket(bucket) from error

    def close(self) -> None:
        """See :meth:`Medium.close`. fsspec closes the connections with the file system."""

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """See :meth:`Medium.sizes`. If ``fs`` is asynchronous, requests run at the same time."""
        if isinstance(self._fs, AsyncFileSystem):
            return list(self._run_concurrently([self._size_async(name) for name in names]))
        return [self._size(name) for name in names]

    def load(self, name: str, buffer: memoryview, check: LoadCheck | None = None) -> LoadOutcome:
        """See :meth:`Medium.load`."""
        data = self._fetch(name, len(buffer))
        if data is None:
            return LoadOutcome.MISS
        if len(data) != len(buffer):
            if self.sizes([name]) == [len(buffer)]:
                raise OSError(
                    errno.EIO,
                    "the answer to a read has another length than the object; a proxy may have changed it",
                    name,
                )
            return LoadOutcome.CORRUPT
        for start in range(0, len(data), CHECK_BYTES):
            part = memoryview(data)[start : start + CHECK_BYTES]
            _copy_into(buffer[start : start + len(part)], part)
            if check is not None:
                check.filled(len(part))
        return LoadOutcome.HIT

    def _fetch(self, name: str, nbytes: int) -> bytes | None:
        """Return an object, or ``None``. If the object's size is not ``nbytes``, the result has a wrong size."""
        try:
            return bytes(self._fs.cat_file(self._path(name)))
        except FileNotFoundError:
            return None

    def store(self, name: str, buffer: memoryview, seal: StoreSeal | None = None) -> None:
        """See :meth:`Medium.store`."""
        if seal is not None:
            seal.seal()
        self._fs.pipe_file(self._path(name), bytes(buffer))

    def create(self, name: str, data: bytes) -> bool:
        """See :meth:`Medium.create`."""
        # Only a file system with a server behind it decides by itself which caller is first.
        one_at_a_time = nullcontext() if isinstance(self._fs, AsyncFileSystem) else _create_lock
        try:
            with one_at_a_time:
                self._fs.pipe_file(self._path(name), data, mode="create")
        except FileExistsError:
            return False
        return True

    def delete(self, names: Sequence[str]) -> None:
        """See :meth:`Medium.delete`."""
        errors = DeletionErrors()
        found: Iterable[OSError | None] = map(self._delete, names)  # one by one, so that the first failure ends it
        if isinstance(self._fs, AsyncFileSystem):
            found = self._run_concurrently([self._delete_async(name) for name in names])
        for name, error in zip(names, found, strict=True):
            if error is not None:
                errors.add(name, error)
        errors.raise_any(len(names))

    def entries(self, folder: str, progress: Callable[[], None] = lambda: None) -> list[Entry]:
        """See :meth:`Medium.entries`."""
        return [entry for entry in self._entries(folder, progress) if not entry.name.startswith(".")]

    def read_small(self, name: str, max_bytes: int = MAX_SMALL_BYTES) -> bytes | None:
        """See :meth:`Medium.read_small`."""
        path = self._path(name)
        try:
            if self._fs.info(path)["type"] != "file":
                raise ForeignFileError(errno.EINVAL, "it is no file", path)
            data = bytes(self._fs.cat_file(path, start=0, end=max_bytes + 1))
        except FileNotFoundError:
            return None
        return _limited(data, max_bytes, path)

    def move(self, name: str, target: str) -> None:
        """See :meth:`Medium.move`."""
        with suppress(FileNotFoundError):
            self._fs.cp_file(self._path(name), self._path(target))
            self._fs.rm_file(self._path(name))

    def _entries(self, folder: str, progress: Callable[[], None] = lambda: None) -> list[Entry]:
        path = self._path(folder)
        try:
            listed = self._fs.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = [(found["name"].rstrip("/").rpartition("/")[2], found) for found in listed]
        return [
            Entry(name, found["type"] == "directory", int(found.get("size") or 0), time_of(found))
            for name, found in names
            if name and found["name"].strip("/") != path.strip("/")  # the marker of an empty folder
        ]

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _size(self, name: str) -> int | None:
        try:
            found = self._fs.info(self._path(name))
        except FileNotFoundError:
            return None
        return int(found["size"]) if found["type"] == "file" else None

    async def _size_async(self, name: str) -> int | None:
        """Return the size, on fsspec's event loop. Cancellation has no effect on the medium."""
        try:
            found = await self._fs._info(self._path(name))
        except FileNotFoundError:
            return None
        return int(found["size"]) if found["type"] == "file" else None

    def _delete(self, name: str) -> OSError | None:
        """Delete an object. Return an error that may concern this object only; raise any other."""
        try:
            self._fs.rm_file(self._path(name))
        except Exception as error:
            return _deletion_error(error)
        return None

    async def _delete_async(self, name: str) -> OSError | None:
        """Delete as :meth:`_delete`, on fsspec's event loop. Cancelled, the object may be deleted or not."""
        try:
            await self._fs._rm_file(self._path(name))
        except Exception as error:
            return _deletion_error(error)
        return None

    def _run_concurrently(self, requests: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Run requests on fsspec's event loop. Raise the first error after all requests have ended."""
        done: list[Any] = sync(self._fs.loop, _gather_limited, requests)
        for result in done:
            if isinstance(result, BaseException):
                raise result
        return done

    def _no_bucket(self, bucket: str) -> FileNotFoundError:
        return FileNotFoundError(
            2, "there is no such bucket, or these credentials cannot see it; create the bucket or fix the URL", bucket
        )


class RenamingStore(ObjectStore):
    """A server that shows unfinished files. So a file is written under a temporary name and then renamed."""

    def __init__(self, fs: Any, root: str) -> None:
        super().__init__(_StandardErrors(fs), root)

    def open(self) -> None:
        """See :meth:`Medium.open`."""
        self._make_folder(self._path(TEMPORARY_FOLDER))

    def store(self, name: str, buffer: memoryview, seal: StoreSeal | None = None) -> None:
        """See :meth:`Medium.store`."""
        if seal is not None:
            seal.seal()
        path = self._path(name)
        temporary = self._path(f"{TEMPORARY_FOLDER}/{temporaries.temporary_name()}")
        try:
            self._fs.pipe_file(temporary, bytes(buffer))
            self._rename(temporary, path)
        except BaseException:
            with suppress(Exception):
                self._fs.rm_file(temporary)
            raise

    def create(self, name: str, data: bytes) -> bool:
        """See :meth:`Medium.create`. Its guarantee depends on the server: it must open files exclusively."""
        path = self._path(name)
        self._make_folder(path.rpartition("/")[0])
        try:
            with self._fs.open(path, "xb") as file:
                file.write(data)
        except FileExistsError:
            return False
        return True

    def move(self, name: str, target: str) -> None:
        """See :meth:`Medium.move`."""
        path = self._path(target)
        self._make_folder(path.rpartition("/")[0])
        with suppress(FileNotFoundError):
            self._fs.mv(self._path(name), path)

    def store_new(self, name: str, buffer: memoryview, seal: StoreSeal | None = None) -> bool:
        """See :meth:`Medium.store_new`. If several callers store at the same moment, each may get ``True``."""
        if self.sizes([name]) != [None]:
            return False
        self.store(name, buffer, seal)
        return True

    def remove_leftovers(self, stopped: Callable[[], bool]) -> int:
        """See :meth:`Medium.remove_leftovers`."""
        count = 0
        for name in temporaries.leftovers(self._entries(TEMPORARY_FOLDER), self._now_seconds):
            if stopped():
                break
            self.delete([f"{TEMPORARY_FOLDER}/{name}"])
            count += 1
        return count

    def _rename(self, temporary: str, path: str) -> None:
        """Give a file its name. An SMB server refuses to replace a file, so that one is deleted first."""
        for _ in range(3):
            try:
                self._fs.mv(temporary, path)
                return
            except FileNotFoundError:
                self._make_folder(path.rpartition("/")[0])
            except FileExistsError:
                with suppress(FileNotFoundError):
                    self._fs.rm_file(path)
        self._fs.mv(temporary, path)

    def _make_folder(self, folder: str) -> None:
        """Make a folder and those above it, unless they exist.

        fsspec asks whether a folder exists, and makes it then. If another writer makes it in between, an SFTP server
        answers with an error that does not say so. Each try comes at least one folder further.
        """
        tries = 1 + folder.removeprefix(self._root).count("/")
        while True:
            tries -= 1
            try:
                self._fs.makedirs(folder, exist_ok=True)
                return
            except OSError:
                if tries < 0:
                    raise

    def _now_seconds(self) -> float:
        """Return the server's time, from a new file."""
        temporary = self._path(f"{TEMPORARY_FOLDER}/{temporaries.temporary_name()}")
        try:
            self._fs.pipe_file(temporary, b"x")
            return time_of(self._fs.info(temporary))
        finally:
            with suppress(Exception):
                self._fs.rm_file(temporary)


class _StandardErrors:
    """A file system whose errors have Python's own classes: that of smbprotocol for ``ENOENT`` is another one."""

    def __init__(self, fs: Any) -> None:
        self._fs = fs

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._fs, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            try:
                return found(*arguments, **named)
            except OSError as error:
                if error.errno is None:
                    raise
                raise OSError(error.errno, error.strerror, error.filename) from error

        return call


def _deletion_error(error: Exception) -> OSError | None:
    """Return an error with a number for :class:`DeletionErrors`, ``None`` for an absent object; raise transient errors.

    Client libraries have classes of their own for refusals. So any other error may concern a single object.
    """
    if isinstance(error, FileNotFoundError):
        return None
    if isinstance(error, OSError) and (error.errno is not None or isinstance(error, PermissionError)):
        return error
    if is_transient(error):
        raise error
    return OSError(errno.EIO, f"{type(error).__name__}: {error}")


def _limited(data: bytes, max_bytes: int, path: str) -> bytes:
    if len(data) > max_bytes:
        raise ForeignFileError(errno.EINVAL, f"it has more than {max_bytes} bytes", path)
    return data


def _handle_lost_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle an error on fsspec's event loop that nobody awaits; see :meth:`asyncio.loop.set_exception_handler`.

    aiohttp sends a request's body in a task of its own. If the server dies, that task can fail after the request has
    failed. The tier has counted the failure then, so a traceback would only alarm. asyncio logs all other errors.
    """
    if not isinstance(context.get("exception"), ConnectionError):
        loop.default_exception_handler(context)


def _copy_into(buffer: memoryview, data: memoryview) -> None:
    """Copy bytes into a buffer of their size. Unlike a slice, numpy lets other threads run meanwhile (C8)."""
    np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(data, np.uint8))


async def _gather_limited(requests: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Await all requests, at most ``MAX_CONCURRENT_REQUESTS`` at a time, and return results and errors.

    Cancellation cancels the requests.
    """
    slots = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)

    async def one(request: Coroutine[Any, Any, Any]) -> Any:
        async with slots:
            return await request

    return await asyncio.gather(*map(one, requests), return_exceptions=True)


def time_of(found: dict[str, Any]) -> float:
    """Return the time at which an object was stored.

    If the server gives no time, return the current time, so that no object is removed because of its age.
    """
    for key in _TIME_FIELDS:
        value = found.get(key)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, str) and value:
            with suppress(ValueError):
                return datetime.datetime.fromisoformat(value).timestamp()
        if isinstance(value, int | float):
            return float(value)
    return time.time()
