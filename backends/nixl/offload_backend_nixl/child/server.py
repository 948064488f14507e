"""The loop of the child process: it takes requests, keeps transfers in progress, and answers."""

from __future__ import annotations

import errno
import json
import mmap
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from offload_backend_nixl.child.bucket import BucketStorage, nixl_params
from offload_backend_nixl.child.engine import Direction, NixlEngine, Piece, Transfer
from offload_backend_nixl.child.folder import FolderStorage
from offload_backend_nixl.child.storage import Pending, Storage
from offload_backend_nixl.frame import HEAD_BYTES, OVERHEAD_BYTES
from offload_backend_nixl.protocol import (
    MAX_ENTRIES,
    MAX_PACKET_BYTES,
    RING,
    Answer,
    Operation,
    Outcome,
    Request,
    decode_request,
    encode_answer,
)

MAX_FAILURES = 3
"""After so many failed file transfers in a row the process ends, because a plugin may be unusable after an error."""
_THREADS = 8
_MIN_POLL_SECONDS = 20e-6
_MAX_POLL_SECONDS = 1e-3
_POLL_PART = 8
"""The pause between two polls is this part of the time since a transfer last began or ended."""


class Server:
    """The server of one parent.

    Args:
        connection: the parent's end of a socket pair of packets.
        storage: the medium.
        engine: NIXL.
    """

    def __init__(self, connection: socket.socket, storage: Storage, engine: NixlEngine) -> None:
        self._connection = connection
        self._storage = storage
        self._engine = engine
        self._threads = ThreadPoolExecutor(_THREADS, "request")
        self._loads: deque[Request] = deque()
        self._stores: deque[Request] = deque()
        self._turns = deque([self._loads, self._stores])
        """Transfers that have not begun. The first queue has the next turn: no load waits for all stores before it."""
        self._transfers: dict[int, tuple[Transfer, Pending, Request]] = {}
        self._failures = 0
        self._changed_seconds = time.monotonic()

    def run(self) -> None:
        """Serve until the parent closes its end, or until NIXL seems unusable."""
        while self._failures < MAX_FAILURES:
            while self._may_receive():
                if not self._receive():
                    return
            self._begin_next()
            self._poll()

    def _may_receive(self) -> bool:
        """Wait for a request: not at all if a transfer waits, and only a short time if one is in progress."""
        pause = None
        if self._loads or self._stores:
            pause = 0.0
        elif self._transfers:
            pause = (time.monotonic() - self._changed_seconds) / _POLL_PART
            pause = min(max(pause, _MIN_POLL_SECONDS), _MAX_POLL_SECONDS)
        readable, _, _ = select.select([self._connection], [], [], pause)
        return bool(readable)

    def _receive(self) -> bool:
        """Take the next request; return ``False`` at the parent's end.

        Transfers wait for their turn, questions do not.
        """
        packet, descriptors, _, _ = socket.recv_fds(self._connection, MAX_PACKET_BYTES + 1, 1)
        try:
            if packet:
                self._begin(decode_request(packet), descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return bool(packet)

    def _begin(self, request: Request, descriptors: Sequence[int]) -> None:
        operation = request.operation
        if operation in (Operation.LOAD, Operation.STORE):
            (self._loads if operation is Operation.LOAD else self._stores).append(request)
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

    def _begin_next(self) -> None:
        """Begin one transfer.

        A plugin may move all bytes before its call returns. So the transfers that have ended are answered before the
        next one begins, and the parent copies one object while the next one is read.
        """
        if not self._turns[0]:
            self._turns.rotate()
        if self._turns[0]:
            request = self._turns[0].popleft()
            self._turns.rotate()
            self._answer_errors(request.number, lambda: self._begin_transfer(request))

    def _map(self, request: Request, descriptors: Sequence[int]) -> None:
        if len(descriptors) != 1:
            raise OSError(errno.EPROTO, f"{len(descriptors)} descriptors came in place of one")
        self._engine.add_memory(request.memory, mmap.mmap(descriptors[0], 0))
        self._answer(Answer(Outcome.DONE, request.number))

    def _begin_transfer(self, request: Request) -> None:
        self._changed_seconds = time.monotonic()
        is_load = request.operation is Operation.LOAD
        (name,) = request.names
        begin = self._storage.begin_load if is_load else self._storage.begin_store
        pending = begin(name, request.nbytes)
        if isinstance(pending, Outcome):
            self._answer(Answer(pending, request.number))
            return
        try:
            direction: Direction = "READ" if is_load else "WRITE"
            transfer = self._engine.start(direction, pieces_of(request), pending.target)
        except OSError:
            self._failures += 1
            with suppress(OSError):
                pending.finish(False)
            raise
        self._transfers[request.number] = transfer, pending, request

    def _poll(self) -> None:
        """Answer the transfers that have ended."""
        for number, (transfer, pending, request) in list(self._transfers.items()):
            succeeded = transfer.poll()
            if succeeded is not None:
                del self._transfers[number]
                self._changed_seconds = time.monotonic()
                self._end(request, pending, succeeded)

    def _end(self, request: Request, pending: Pending, succeeded: bool) -> None:
        """Answer a transfer that has ended.

        After the failure of one piece, NIXL may still fill others. In the ring that does no harm. For other memory the
        process ends in place of an answer.
        """
        number = request.number
        if not succeeded and request.operation is Operation.LOAD and request.memory != RING:
            self._failures = MAX_FAILURES
            return
        if self._storage.finishes_slowly and not succeeded:
            self._in_thread(number, lambda: self._finish(number, pending, succeeded))
            return
        self._failures = 0 if succeeded else self._failures + 1
        self._answer_errors(number, lambda: self._finish(number, pending, succeeded))

    # The methods below run on any thread.

    def _finish(self, number: int, pending: Pending, succeeded: bool) -> None:
        self._answer(Answer(pending.finish(succeeded), number))

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


def failure(number: int, error: Exception) -> Answer:
    """Return the answer for an error."""
    code = error.errno if isinstance(error, OSError) and error.errno is not None else errno.EIO
    text = (error.strerror or str(error)) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    place = f": {error.filename}" if isinstance(error, OSError) and error.filename else ""
    return Answer(Outcome.FAILED, number, code=code, text=text + place)


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
        server = Server(connection, storage, NixlEngine(settings["plugin"], params, memory))
    except Exception as error:
        connection.send(encode_answer(failure(request.number, error)))
        return
    connection.send(encode_answer(Answer(Outcome.DONE, request.number)))
    server.run()


def pieces_of(request: Request) -> list[Piece]:
    """Return the places of an object in shared memory, in their order in the object.

    Raises:
        OSError: it is smaller than its head and tail.
    """
    if request.memory == RING:
        return [Piece(RING, request.offset, request.nbytes)]
    content = request.nbytes - OVERHEAD_BYTES
    if content <= 0:
        raise OSError(errno.EPROTO, f"an object of {request.nbytes} bytes has no content")
    return [
        Piece(RING, request.offset, HEAD_BYTES),
        Piece(request.memory, request.start, content),
        Piece(RING, request.offset + HEAD_BYTES, OVERHEAD_BYTES - HEAD_BYTES),
    ]


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
