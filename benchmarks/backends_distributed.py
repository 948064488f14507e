"""Contenders of ``benchmarks/backends.py`` for distributed stores: the client of each engine alone, without us.

Mooncake's client and NIXL move the same objects between the same memory and the same store. A bucket for NIXL lies on a
test server, which is slow: the figures there show the cost beside a slow store. The server of LMCache that
our module is loaded into has no client for opaque objects. LMCache's older one has (``lm://``), so the two move the
same objects from and to that server. Plain TCP to a process that keeps the bytes in memory is a further row there.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.backends_rig import CHUNK_BYTES, Medium, Memory, PlainThreads
from tests.support.clusters import lmcache, mooncake, nixl
from tests.support.s3_server import S3_CREDENTIALS, S3Server
from tests.support.server_process import ServerProcess, accepts, free_port

DISTRIBUTED: dict[str, Callable[[], str | None]] = {
    "lmcache": lmcache.why_not,
    "mooncake": mooncake.why_not,
    "nixl": nixl.why_not,
}
"""The backends on distributed stores, each with a function that returns the reason for which it cannot run here."""

_CALL_BYTES = 16 * 1024**2
_AGENT = "bench"


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
        place = store.lab.server, store.lab.bucket
        return [partial(NixlBucket, "limit: NIXL", memory, chunks, page_bytes, *place)]
    if backend == "nixl":
        return [partial(NixlFiles, "limit: NIXL", memory, chunks, page_bytes, folder / "nixl-alone")]
    return [
        partial(LMCacheAlone, "limit: LMCache's client", memory, chunks, threads, page_bytes, folder),
        partial(PlainTcp, "plain TCP", memory, chunks, threads),
    ]


class _Pages(PlainThreads):
    """Contender with one object per page."""

    def __init__(self, name: str, memory: Memory, chunks: int, threads: int, page_bytes: int) -> None:
        super().__init__(name, memory, chunks, threads)
        self._pages = [
            view[start : start + page_bytes] for view in self._views for start in range(0, CHUNK_BYTES, page_bytes)
        ]
        self._at_once = max(1, _CALL_BYTES // page_bytes)

    def _batches(self, number: int) -> Iterator[tuple[list[str], list[memoryview]]]:
        names = [f"alone/{number}/{index}" for index in range(len(self._pages))]
        for start in range(0, len(names), self._at_once):
            yield names[start : start + self._at_once], self._pages[start : start + self._at_once]


class MooncakeAlone(_Pages):
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


class _NixlAlone(_Pages):
    """NIXL, eight transfers at a time on one thread, in memory that is registered once."""

    plugin = segment = ""
    pause_seconds = 0.0
    """The pause between two looks at a transfer."""

    def __init__(
        self, name: str, memory: Memory, chunks: int, page_bytes: int, params: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(name, memory, chunks, 1, page_bytes)
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self._agent = nixl_agent(_AGENT, nixl_agent_config(backends=[]))
        self._agent.create_backend(self.plugin, dict(params or {}))
        whole = np.frombuffer(memory.pool.memory, np.uint8)
        self._agent.register_memory([(whole.ctypes.data, whole.nbytes, 0, "")], "DRAM", backends=[self.plugin])
        self._at_once = 8

    @abstractmethod
    def _open(self, direction: str, name: str) -> tuple[int, str]:
        """Return the number and the name that NIXL wants for an object."""

    def _close(self, number: int) -> None:
        """End the use of an object, whose number is given."""

    def _transfer(self, direction: str, names: list[str], pages: list[memoryview]) -> None:
        agent, plugins = self._agent, [self.plugin]
        running: list[tuple[Any, Any, int]] = []
        for name, page in zip(names, pages, strict=True):
            number, object_name = self._open(direction, name)
            address = np.frombuffer(page, np.uint8).ctypes.data
            target = agent.register_memory([(0, len(page), number, object_name)], self.segment, backends=plugins)
            handle = agent.initialize_xfer(
                direction,
                agent.get_xfer_descs([(address, len(page), 0)], "DRAM"),
                agent.get_xfer_descs([(0, len(page), number)], self.segment),
                _AGENT,
                b"",
                plugins,
            )
            agent.transfer(handle)
            running.append((handle, target, number))
        for handle, target, number in running:
            while (state := agent.check_xfer_state(handle)) == "PROC":
                time.sleep(self.pause_seconds)
            if state != "DONE":
                raise SystemExit(f"{self.name}: {state}")
            agent.release_xfer_handle(handle)
            agent.deregister_memory(target, backends=plugins)
            self._close(number)

    def _store_calls(self, number: int) -> list[Callable[[], Any]]:
        return [partial(self._transfer, "WRITE", *batch) for batch in self._batches(number)]

    def _load_calls(self, number: int) -> list[Callable[[], Any]]:
        return [partial(self._transfer, "READ", *batch) for batch in self._batches(number)]


class NixlFiles(_NixlAlone):
    """NIXL's plugin POSIX on files."""

    plugin, segment = "POSIX", "FILE"

    def __init__(self, name: str, memory: Memory, chunks: int, page_bytes: int, folder: Path) -> None:
        super().__init__(name, memory, chunks, page_bytes)
        folder.mkdir(exist_ok=True)
        self._folder = folder

    def _open(self, direction: str, name: str) -> tuple[int, str]:
        flags = os.O_RDONLY if direction == "READ" else os.O_RDWR | os.O_CREAT
        return os.open(self._folder / name.replace("/", "-"), flags, 0o600), ""

    def _close(self, number: int) -> None:
        os.close(number)

    def clean(self, number: int) -> None:
        for path in self._folder.iterdir():
            path.unlink()


class NixlBucket(_NixlAlone):
    """NIXL's plugin OBJ on a bucket, below a prefix of its own."""

    plugin = segment = "OBJ"
    pause_seconds = 0.0005

    def __init__(self, name: str, memory: Memory, chunks: int, page_bytes: int, server: S3Server, bucket: str) -> None:
        params = {"bucket": bucket, "endpoint_override": server.url, "scheme": "http", "num_threads": "8"}
        super().__init__(name, memory, chunks, page_bytes, params)
        self._server, self._bucket = server, bucket
        self._numbers = itertools.count(1)

    def _open(self, direction: str, name: str) -> tuple[int, str]:
        return next(self._numbers), name

    def clean(self, number: int) -> None:
        names = [name for batch, _ in self._batches(number) for name in batch]
        for start in range(0, len(names), 1000):
            objects = [{"Key": name} for name in names[start : start + 1000]]
            self._server.client().delete_objects(Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True})


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


class LMCacheAlone(_Pages):
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
