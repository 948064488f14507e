"""The loop of the child process: it takes requests, answers questions, and hands transfers to the movers."""

from __future__ import annotations

import errno
import json
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from offload_backend_nixl.child.bucket import BucketStorage, nixl_params
from offload_backend_nixl.child.engine import NixlEngine
from offload_backend_nixl.child.folder import FolderStorage
from offload_backend_nixl.child.mapped_memory import MappedMemory
from offload_backend_nixl.child.mover import Mover
from offload_backend_nixl.child.storage import Storage
from offload_backend_nixl.child.transfers import Group, TransferQueue, failure
from offload_backend_nixl.protocol import (
    MAX_ENTRIES,
    MAX_PACKET_BYTES,
    Answer,
    Operation,
    Outcome,
    Request,
    decode_request,
    encode_answer,
)

_THREADS = 8
_LAST_ANSWERS_SECONDS = 1.0
"""Time for the movers to answer the transfers that have ended, before the process ends."""
_FILE_MOVERS = 2
"""Threads that move files with the plugin POSIX. It moves all bytes on the thread that calls it."""


class Server:
    """The server of one parent.

    Args:
        connection: the parent's end of a socket pair of packets.
        storage: the medium.
        engines: NIXL, once for each thread that moves bytes.
    """

    def __init__(self, connection: socket.socket, storage: Storage, engines: Sequence[NixlEngine]) -> None:
        self._connection = connection
        self._storage = storage
        self._engines = engines
        self._memories: dict[int, MappedMemory] = {}
        self._threads = ThreadPoolExecutor(_THREADS, "request")
        self._queue = TransferQueue()

    def run(self) -> None:
        """Serve until the parent closes its end, or until NIXL seems unusable."""
        threads = []
        for number, engine in enumerate(self._engines):
            mover = Mover(number, engine, self._storage, self._memories, self._queue, self._threads)
            threads.append(threading.Thread(target=self._move, args=[mover], name="mover", daemon=True))
            threads[-1].start()
        while self._receive():
            pass
        self._queue.close()
        until = time.monotonic() + _LAST_ANSWERS_SECONDS
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _move(self, mover: Mover) -> None:
        try:
            mover.run()
        finally:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RD)  # ends the other thread's wait for a request

    def _receive(self) -> bool:
        """Take the next request; return ``False`` at the parent's end, and after the end of a mover."""
        packet, descriptors, _, _ = socket.recv_fds(self._connection, MAX_PACKET_BYTES + 1, 1)
        try:
            if packet:
                self._begin(decode_request(packet), descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return bool(packet)

    def _begin(self, request: Request, descriptors: Sequence[int]) -> None:
        """Begin a request. A question waits for no transfer."""
        operation = request.operation
        if operation in (Operation.LOAD, Operation.STORE):
            self._queue.put(Group(request, self._answer, self._queue.count))
        elif operation is Operation.MAP:
            self._answer_errors(request.number, lambda: self._map(request, descriptors))
        elif operation is Operation.SIZES:
            self._in_thread(request.number, lambda: self._sizes(request))
        elif operation is Operation.DELETE:
            self._in_thread(request.number, lambda: self._delete(request))
        elif operation is Operation.LIST:
            self._in_thread(request.number, lambda: self._list(request))
        else:
            self._answer(Answer(Outcome.FAILED, request.number, code=errno.EPROTO, text="configured already"))

    def _map(self, request: Request, descriptors: Sequence[int]) -> None:
        if len(descriptors) != 1:
            raise OSError(errno.EPROTO, f"{len(descriptors)} descriptors came in place of one")
        memory = mmap.mmap(descriptors[0], 0)
        for engine in self._engines:
            engine.add_memory(request.memory, memory)
        self._memories[request.memory] = MappedMemory(memory)
        self._answer(Answer(Outcome.DONE, request.number))

    # The methods below run on any thread.

    def _sizes(self, request: Request) -> None:
        self._answer(Answer(Outcome.SIZES, request.number, sizes=tuple(self._storage.sizes(request.names))))

    def _delete(self, request: Request) -> None:
        self._storage.delete(request.names)
        self._answer(Answer(Outcome.DONE, request.number))

    def _list(self, request: Request) -> None:
        entries, more = self._storage.list_after("".join(request.names), MAX_ENTRIES)
        self._answer(Answer(Outcome.ENTRIES, request.number, entries=tuple(entries), more=more))

    def _in_thread(self, number: int, work: Callable[[], None]) -> None:
        self._threads.submit(self._answer_errors, number, work)

    def _answer_errors(self, number: int, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._answer(failure(number, error))

    def _answer(self, answer: Answer) -> None:
        self._connection.send(encode_answer(answer))


def serve(connection: socket.socket, memory: mmap.mmap) -> None:
    """Take the configuration, start NIXL, and serve until the parent's end."""
    request = decode_request(connection.recv(MAX_PACKET_BYTES + 1))
    try:
        if request.operation is not Operation.CONFIGURE:
            raise OSError(errno.EPROTO, "the first request is not the configuration")
        settings = json.loads(request.text)
        storage = make_storage(settings)
        params = settings["params"]
        if settings["plugin"] == "OBJ":
            params = nixl_params(params, settings["credentials"])
        count = _FILE_MOVERS if settings["plugin"] == "POSIX" else 1
        engines = [NixlEngine(settings["plugin"], params, memory) for _ in range(count)]
        server = Server(connection, storage, engines)
    except Exception as error:
        connection.send(encode_answer(failure(request.number, error)))
        return
    connection.send(encode_answer(Answer(Outcome.DONE, request.number)))
    server.run()


def make_storage(settings: Mapping[str, Any]) -> Storage:
    """Return the medium of a configuration.

    Raises:
        OSError: it cannot be used.
    """
    if settings["plugin"] == "OBJ":
        return BucketStorage(
            settings["params"], settings["credentials"], settings["prefix"], settings["deadline_seconds"]
        )
    return FolderStorage(settings["path"], settings["writer"], settings["create"])
