"""Contenders of ``benchmarks/backends.py``: NIXL alone, and a plain loop around it that checks the objects too.

A bucket for NIXL lies on a test server, which is slow: the figures there show the cost beside a slow store.
"""

from __future__ import annotations

import itertools
import os
import queue
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.backends_rig import Memory, Pages
from offload_core.objects.format import checksum
from tests.support.s3_server import S3Server

_AGENT = "bench"
FILE_THREADS = 2
"""The most threads that move files: as many as the child process of our tier has."""


class _Nixl(Pages):
    """NIXL, eight transfers at a time on each thread, in memory that is registered once for each.

    Each thread has an agent of its own. The name says the number of threads, which may differ from that of our tier.

    Args:
        checked: hash each object on the same thread, before its store and right after its load. It is the least work
            that a tier with checksums can do around NIXL on as many threads.
    """

    plugin = segment = ""
    pause_seconds = 0.0
    """The pause between two looks at a transfer."""

    def __init__(
        self,
        name: str,
        memory: Memory,
        chunks: int,
        threads: int,
        page_bytes: int,
        params: Mapping[str, str] | None = None,
        *,
        checked: bool = False,
    ) -> None:
        name += f", {threads} thread" + "s" * (threads > 1)
        super().__init__(name, memory, chunks, threads, page_bytes)
        self._at_once = 8
        self._idle: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for _ in range(threads):
            self._idle.put(self._make_agent(memory, params or {}))
        self._checked = checked
        self._stored: dict[str, bytes] = {}

    def _make_agent(self, memory: Memory, params: Mapping[str, str]) -> Any:
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        agent = nixl_agent(_AGENT, nixl_agent_config(backends=[]))
        agent.create_backend(self.plugin, dict(params))
        whole = np.frombuffer(memory.pool.memory, np.uint8)
        agent.register_memory([(whole.ctypes.data, whole.nbytes, 0, "")], "DRAM", backends=[self.plugin])
        return agent

    @abstractmethod
    def _open(self, direction: str, name: str) -> tuple[int, str]:
        """Return the number and the name that NIXL wants for an object."""

    def _close(self, number: int) -> None:
        """End the use of an object, whose number is given."""

    def _transfer(self, direction: str, names: list[str], pages: list[memoryview]) -> None:
        agent = self._idle.get()
        try:
            self._transfer_by(agent, direction, names, pages)
        finally:
            self._idle.put(agent)

    def _transfer_by(self, agent: Any, direction: str, names: list[str], pages: list[memoryview]) -> None:
        plugins = [self.plugin]
        running: list[tuple[Any, Callable[[], None]]] = []
        objects = list(zip(names, pages, strict=True))
        for name, page in self._to_store(agent, objects) if direction == "WRITE" else objects:
            if self._checked and direction == "WRITE":
                self._stored[name] = checksum(page)
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
            end: Callable[[], None] = partial(self._end, agent, direction, name, page, handle, target, number)
            if agent.transfer(handle) == "DONE" or agent.check_xfer_state(handle) == "DONE":
                end()
            else:
                running.append((handle, end))
        for handle, end in running:
            while (state := agent.check_xfer_state(handle)) == "PROC":
                time.sleep(self.pause_seconds)
            if state != "DONE":
                raise SystemExit(f"{self.name}: {state}")
            end()

    def _to_store(self, agent: Any, objects: list[tuple[str, memoryview]]) -> list[tuple[str, memoryview]]:
        """Return those of a batch's objects that are to be stored."""
        return objects

    def _end(
        self, agent: Any, direction: str, name: str, page: memoryview, handle: Any, target: Any, number: int
    ) -> None:
        if self._checked and direction == "READ" and checksum(page) != self._stored[name]:
            raise SystemExit(f"{self.name}: {name} has other bytes than were stored")
        agent.release_xfer_handle(handle)
        agent.deregister_memory(target, backends=[self.plugin])
        self._close(number)

    def _store_calls(self, number: int) -> list[Callable[[], Any]]:
        return [partial(self._transfer, "WRITE", *batch) for batch in self._batches(number)]

    def _load_calls(self, number: int) -> list[Callable[[], Any]]:
        return [partial(self._transfer, "READ", *batch) for batch in self._batches(number)]


class NixlFiles(_Nixl):
    """NIXL's plugin POSIX on files. It moves all bytes on the thread that calls it."""

    plugin, segment = "POSIX", "FILE"

    def __init__(
        self,
        name: str,
        memory: Memory,
        chunks: int,
        threads: int,
        page_bytes: int,
        folder: Path,
        *,
        checked: bool = False,
    ) -> None:
        super().__init__(name, memory, chunks, min(threads, FILE_THREADS), page_bytes, checked=checked)
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


class NixlBucket(_Nixl):
    """NIXL's plugin OBJ on a bucket, below a prefix of its own.

    One thread begins the transfers, as in our tier's child process. The plugin has threads of its own.
    """

    plugin = segment = "OBJ"
    pause_seconds = 0.0005

    def __init__(self, name: str, memory: Memory, chunks: int, page_bytes: int, server: S3Server, bucket: str) -> None:
        params = {"bucket": bucket, "endpoint_override": server.url, "scheme": "http", "num_threads": "8"}
        super().__init__(name, memory, chunks, 1, page_bytes, params)
        self._server, self._bucket = server, bucket
        self._numbers = itertools.count(1)

    def _open(self, direction: str, name: str) -> tuple[int, str]:
        return next(self._numbers), name

    def clean(self, number: int) -> None:
        names = [name for batch, _ in self._batches(number) for name in batch]
        for start in range(0, len(names), 1000):
            objects = [{"Key": name} for name in names[start : start + 1000]]
            self._server.client().delete_objects(Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True})


class AskedNixlBucket(NixlBucket):
    """The same, for objects that the bucket does not have. NIXL asks, for all objects of a batch at once."""

    def _to_store(self, agent: Any, objects: list[tuple[str, memoryview]]) -> list[tuple[str, memoryview]]:
        found = agent.query_memory([(0, 0, 0, name) for name, _ in objects], self.plugin, self.segment)
        return [item for item, info in zip(objects, found, strict=True) if info is None]
