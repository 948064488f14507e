"""Contenders of ``benchmarks/backends.py`` for distributed stores: the client of each engine alone, without us.

Mooncake's client and NIXL move the same objects between the same memory and the same store. The server of LMCache that
our module is loaded into has no client for opaque objects. LMCache's older one has (``lm://``), so the two move the
same objects from and to that server. Plain TCP to a process that keeps the bytes in memory is a further row there.
"""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.backends_nixl import AskedNixlBucket, NixlBucket, NixlFiles
from benchmarks.backends_rig import CHUNK_BYTES, Medium, Memory, Pages, PlainThreads
from tests.support.clusters import lmcache, mooncake, nixl
from tests.support.s3_server import S3_CREDENTIALS
from tests.support.server_process import ServerProcess, accepts, free_port

DISTRIBUTED: dict[str, Callable[[], str | None]] = {
    "lmcache": lmcache.why_not,
    "mooncake": mooncake.why_not,
    "nixl": nixl.why_not,
}
"""The backends on distributed stores, each with a function that returns the reason for which it cannot run here."""


class Store(NamedTuple):
    """A running store."""

    lab: Any
    tier: dict[str, Any]
    """The configuration keys of a tier on it."""


@contextmanager
def running_stores(
    places: Iterable[tuple[str, Medium]], folder: Path, nbytes: int
) -> Iterator[dict[tuple[str, Medium], Store]]:
    """Start the stores of some backends and media, and stop them at the end."""
    gib = max(1, -(-4 * nbytes // 1024**3))
    makers: dict[tuple[str, Medium], Callable[[], Any]] = {
        ("lmcache", "network"): lambda: lmcache.LMCacheCluster(folder / "lmcache.log", l1_gib=gib),
        ("mooncake", "network"): lambda: mooncake.MooncakeCluster(folder, segment=f"{gib}GB"),
        ("nixl", "page cache"): nixl.FolderLab,
        ("nixl", "network"): nixl.BucketLab,
    }
    labs = {place: makers[place]() for place in dict.fromkeys(places) if place in makers}
    if ("nixl", "network") in labs:
        os.environ |= S3_CREDENTIALS
    try:
        for lab in labs.values():
            lab.start()
        yield {place: Store(lab, lab.tier()) for place, lab in labs.items()}
    finally:
        for lab in labs.values():
            lab.stop()


def alone(
    backend: str, memory: Memory, chunks: int, page_bytes: int, threads: int, store: Store, folder: Path
) -> list[Callable[[], PlainThreads]]:
    """Return factories of the contenders that move a backend's objects without us, the engine's client first."""
    if backend == "mooncake":
        name = "limit: Mooncake's client"
        return [partial(MooncakeAlone, name, memory, chunks, threads, page_bytes, store.tier["master"])]
    if isinstance(store.lab, nixl.BucketLab):
        place = memory, chunks, page_bytes, store.lab.server, store.lab.bucket
        return [
            partial(NixlBucket, "limit: NIXL", *place),
            partial(AskedNixlBucket, "NIXL, stores only what is absent", *place),
        ]
    if backend == "nixl":
        files = partial(NixlFiles, memory=memory, chunks=chunks, threads=threads, page_bytes=page_bytes)
        return [
            partial(files, "limit: NIXL", folder=folder / "nixl-alone"),
            partial(files, "NIXL and a hash", folder=folder / "nixl-checked", checked=True),
        ]
    return [
        partial(LMCacheAlone, "limit: LMCache's client", memory, chunks, threads, page_bytes, folder),
        partial(PlainTcp, "plain TCP", memory, chunks, threads),
    ]


class MooncakeAlone(Pages):
    """Mooncake's own client, in batches of 16 MiB."""

    def __init__(self, name: str, memory: Memory, chunks: int, threads: int, page_bytes: int, master: str) -> None:
        super().__init__(name, memory, chunks, threads, page_bytes)
        from mooncake.store import MooncakeDistributedStore

        self._store = MooncakeDistributedStore()
        own = f"127.0.0.1:{free_port()}"
        if code := self._store.setup(own, "P2PHANDSHAKE", 0, 16 * 1024**2, "tcp", "", master):
            raise SystemExit(f"{name}: no connection to {master}: {code}")

    def _move(self, call: Callable[..., list[int]], names: list[str], pages: list[memoryview]) -> None:
        addresses = [np.frombuffer(page, np.uint8).ctypes.data for page in pages]
        if min(codes := call(names, addresses, [len(page) for page in pages])) < 0:
            raise SystemExit(f"{self.name}: {min(codes)}")

    def _store_calls(self, number: int) -> list[Callable[[], Any]]:
        return [partial(self._move, self._store.batch_put_from, *batch) for batch in self._batches(number)]

    def _load_calls(self, number: int) -> list[Callable[[], Any]]:
        return [partial(self._move, self._store.batch_get_into, *batch) for batch in self._batches(number)]

    def clean(self, number: int) -> None:
        for names, _ in self._batches(number):
            self._store.batch_remove(names, True)

    def close(self) -> None:
        super().close()
        self._store.close()


@dataclass(frozen=True)
class _Page:
    """A page as LMCache's client sees a memory object."""

    byte_array: memoryview

    def get_shape(self) -> Any:
        return torch.Size([len(self.byte_array), 1, 1, 1])

    def get_dtype(self) -> Any:
        return torch.uint8

    def get_memory_format(self) -> Any:
        from lmcache.v1.memory_management import MemoryFormat

        return MemoryFormat.BINARY


class _OldLMCacheClient:
    """LMCache's client of its older server, on a connection and an event loop of its own."""

    def __init__(self, port: int) -> None:
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.connector.lm_connector import LMCServerConnector

        self._loop = asyncio.new_event_loop()
        self._page: _Page | None = None
        memory = SimpleNamespace(
            config=LMCacheEngineConfig.from_defaults(),
            metadata=LMCacheMetadata("bench", 1, 1, 0, 0, torch.uint8, (1, 2, 256, 1, 1), chunk_size=256),
            allocate=lambda *_: self._page,
        )
        self._connector = LMCServerConnector("127.0.0.1", port, self._loop, memory)

    def put(self, names: list[str], pages: list[memoryview]) -> None:
        """Store pages. The server answers no store, so a question after the last one waits for it."""
        for name, page in zip(names, pages, strict=True):
            self._loop.run_until_complete(self._connector.put(self._key(name), _Page(page)))
        if not self._loop.run_until_complete(self._connector.exists(self._key(names[-1]))):
            raise SystemExit(f"LMCache's server has not stored {names[-1]}")

    def get(self, names: list[str], pages: list[memoryview]) -> None:
        for name, page in zip(names, pages, strict=True):
            self._page = _Page(page)
            if self._loop.run_until_complete(self._connector.get(self._key(name))) is None:
                raise SystemExit(f"LMCache's server has not found {name}")

    def close(self) -> None:
        self._loop.run_until_complete(self._connector.close())
        self._loop.close()

    @staticmethod
    def _key(name: str) -> Any:
        from lmcache.utils import CacheEngineKey

        return CacheEngineKey("bench", 1, 0, int(name.rsplit("/", 1)[1]), torch.uint8)


class LMCacheAlone(Pages):
    """LMCache's own client for bytes (``lm://``), a connection for each thread, to a server of its own.

    The server cannot delete, so each round overwrites the objects of the one before.
    """

    def __init__(self, name: str, memory: Memory, chunks: int, threads: int, page_bytes: int, folder: Path) -> None:
        super().__init__(name, memory, chunks, threads, page_bytes)
        port = free_port()
        os.environ |= {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}  # of the client too
        command = [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port)]
        self._server = ServerProcess(command, lambda: accepts(port), folder / "old-lmcache.log")
        self._server.start()
        self._clients = [_OldLMCacheClient(port) for _ in range(threads)]
        self._idle: queue.SimpleQueue[_OldLMCacheClient] = queue.SimpleQueue()
        for client in self._clients:
            self._idle.put(client)

    def _call(self, method: str, names: list[str], pages: list[memoryview]) -> None:
        client = self._idle.get()
        getattr(client, method)(names, pages)
        self._idle.put(client)

    def _store_calls(self, number: int) -> list[Callable[[], Any]]:
        return [partial(self._call, "put", *batch) for batch in self._batches(number)]

    def _load_calls(self, number: int) -> list[Callable[[], Any]]:
        return [partial(self._call, "get", *batch) for batch in self._batches(number)]

    def close(self) -> None:
        super().close()
        for client in self._clients:
            client.close()
        self._server.stop()


_SERVER = """
import socket, sys, threading
nbytes, threads = int(sys.argv[1]), int(sys.argv[2])
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
memory = memoryview(bytearray(nbytes))

def serve(connection):
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = bytearray(17)
    while connection.recv_into(head, 17, socket.MSG_WAITALL) == 17:
        start, count = int.from_bytes(head[1:9], "little"), int.from_bytes(head[9:], "little")
        view = memory[start : start + count]
        if head[0]:
            connection.sendall(view)
        else:
            while len(view):
                view = view[connection.recv_into(view):]
            connection.sendall(b"k")

for _ in range(threads):
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
sys.stdin.read()
"""


class PlainTcp(PlainThreads):
    """Limit of the loopback network: a connection per thread to a process that keeps the bytes in memory."""

    def __init__(self, name: str, memory: Memory, chunks: int, threads: int) -> None:
        super().__init__(name, memory, chunks, threads)
        command = [sys.executable, "-c", _SERVER, str(self.nbytes), str(threads)]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        port = int(self._server.stdout.readline())
        self._idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(threads)]
        for connection in self._idle:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lock = threading.Lock()

    def _request(self, is_load: bool, index: int) -> None:
        view = self._views[index]
        with self._lock:
            connection = self._idle.pop()
        places = (index * CHUNK_BYTES).to_bytes(8, "little") + len(view).to_bytes(8, "little")
        connection.sendall(bytes([is_load]) + places)
        if is_load:
            while len(view):
                view = view[connection.recv_into(view) :]
        else:
            connection.sendall(view)
            connection.recv(1)
        with self._lock:
            self._idle.append(connection)

    def _store_calls(self, number: int) -> list[Callable[[], Any]]:
        return [partial(self._request, False, index) for index in range(len(self._views))]

    def _load_calls(self, number: int) -> list[Callable[[], Any]]:
        return [partial(self._request, True, index) for index in range(len(self._views))]

    def close(self) -> None:
        super().close()
        for connection in self._idle:
            connection.close()
        self._server.communicate()
