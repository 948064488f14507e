"""One connection to the module: the handshake, and the four operations on batches of objects.

Each method sends a whole batch and then reads the answers. A connection that raised cannot be used any more.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from offload_backend_lmcache.client import problems
from offload_backend_lmcache.client.first_read import FirstRead
from offload_backend_lmcache.wire import frames, handshake
from offload_backend_lmcache.wire.addresses import Address, is_private
from offload_backend_lmcache.wire.frames import AnswerHeader, Entry, Found, Kind, Operation, ProtocolError, Status
from offload_backend_lmcache.wire.handshake import Verdict
from offload_backend_lmcache.wire.streams import Stream
from offload_core.api import StoreSeal


class Target(NamedTuple):
    """A server and the terms on which a client talks to it."""

    address: Address
    connect_seconds: float
    io_seconds: float
    token: bytes
    token_variable: str
    """The environment variable of the token, for messages."""
    insecure: bool
    """Permission for a public address."""


class RequestError(OSError):
    """The server refused one request. The connection can still be used."""


class Connection:
    """An open connection. Use it on one thread at a time.

    Args:
        target: the server.

    Raises:
        OSError: nobody answers, or not this protocol, version or token.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._stream = Stream(_connect(target), target.io_seconds)
        self._request_id = int.from_bytes(os.urandom(4), "little")
        try:
            self.max_object_bytes = self._shake_hands()
        except BaseException:
            self._stream.close()
            raise

    def is_usable(self) -> bool:
        """Return whether an idle connection can take a request, as far as this side knows."""
        return self._stream.is_quiet()

    def close(self) -> None:
        """Close the connection. Harmless when repeated."""
        self._stream.close()

    def find(self, names: Sequence[bytes]) -> list[Found]:
        """Return presence and size of each object."""
        request_id = self._request(Operation.FIND, [Entry(name) for name in names])
        body = self._answer(Operation.FIND, request_id, len(names), frames.find_body_bytes(len(names)))
        return frames.decode_found(body, len(names))

    def load(
        self, names: Sequence[bytes], buffers: Sequence[memoryview], checks: Sequence[FirstRead] = ()
    ) -> list[Status]:
        """Fill the buffer of each ``HIT``. A damaged payload is ``DAMAGED``.

        Args:
            checks: one per object, or none. If a check finds its object right, the payload is not summed a second time.
                An object that a check has found right on another connection is a ``HIT``, and is not read again.
        """
        statuses = [Status.HIT] * len(names)
        left = [index for index in range(len(names)) if not (checks and checks[index].is_right)]
        if not left:
            return statuses
        request_id = self._request(Operation.LOAD, [Entry(names[index], len(buffers[index])) for index in left])
        for position, index in enumerate(left):
            check = checks[index] if checks else None
            statuses[index] = self._receive_object(request_id, position, names[index], buffers[index], check)
        return statuses

    def store(
        self, names: Sequence[bytes], buffers: Sequence[memoryview], seals: Sequence[StoreSeal] = ()
    ) -> list[Status]:
        """Store each buffer under its name.

        Args:
            seals: one per object, each of which seals its buffer meanwhile; or none.
        """
        entries = [Entry(name, len(buffer)) for name, buffer in zip(names, buffers, strict=True)]
        request_id = self._request(Operation.STORE, entries)
        nobody: Sequence[StoreSeal | None] = [None] * len(names)
        behind = b""
        for buffer, seal in zip(buffers, seals or nobody, strict=True):
            behind = self._send_object(behind, buffer, seal)
        self._stream.send(behind)
        return frames.decode_statuses(
            Operation.STORE, self._answer(Operation.STORE, request_id, len(names), len(names))
        )

    def delete(self, names: Sequence[bytes]) -> list[Status]:
        """Remove each object. ``BUSY``: it is in use and was not removed."""
        request_id = self._request(Operation.DELETE, [Entry(name) for name in names])
        return frames.decode_statuses(
            Operation.DELETE, self._answer(Operation.DELETE, request_id, len(names), len(names))
        )

    def _request(self, operation: Operation, entries: Sequence[Entry]) -> int:
        self._request_id += 1
        self._stream.send(frames.encode_request(operation, self._request_id, entries))
        return self._request_id

    def _send_object(self, behind: bytes, buffer: memoryview, seal: StoreSeal | None) -> bytes:
        """Send an object but for its beginning, which a seal may complete only then.

        Args:
            behind: the end of the object before.

        Returns:
            The end of this one: its beginning and its checksum.
        """
        if seal is not None and seal.head_bytes != frames.LAST_BYTES:  # another core, or a small object
            seal.seal()
        total = xxhash.xxh3_64()
        stored = _to_nobody if seal is None else seal.stored
        self._stream.send_summed(behind, buffer[frames.LAST_BYTES :], total, stored)
        if seal is not None:
            seal.seal()
        beginning = bytes(buffer[: frames.LAST_BYTES])
        total.update(beginning)
        return beginning + frames.encode_checksum(total.intdigest())

    def _header(self, request_id: int) -> AnswerHeader:
        header = frames.decode_answer_header(self._stream.receive(frames.ANSWER_BYTES))
        if header.request_id != request_id:
            raise ProtocolError(f"the answer to request {header.request_id} in place of {request_id}")
        if header.kind is Kind.FAILURE:
            text = self._body(header).decode(errors="replace")
            raise RequestError(*problems.request_failed(self._target.address, text).args)
        return header

    def _body(self, header: AnswerHeader) -> bytes:
        body = self._stream.receive(header.nbytes)
        if frames.checksum(body) != header.checksum:
            raise ProtocolError("an answer with a damaged body")
        return body

    def _answer(self, operation: Operation, request_id: int, count: int, nbytes: int) -> bytes:
        header = self._header(request_id)
        if (header.kind, header.code, header.position) != (Kind.ANSWER, operation, count) or header.nbytes != nbytes:
            raise ProtocolError(f"an answer that does not fit {operation.name} of {count} objects")
        return self._body(header)

    def _receive_object(
        self, request_id: int, index: int, name: bytes, buffer: memoryview, check: FirstRead | None
    ) -> Status:
        header = self._header(request_id)
        if (header.kind, header.position, header.tag) != (Kind.OBJECT, index, frames.checksum(name)):
            raise ProtocolError("the answer for another object")
        status = frames.decode_status(Operation.LOAD, header.code)
        if status is not Status.HIT:
            return status
        if header.nbytes != len(buffer):
            raise ProtocolError(f"an object of {header.nbytes} bytes in place of {len(buffer)}")
        if check is None:
            beginning, total = buffer[: frames.LAST_BYTES], xxhash.xxh3_64()
            self._stream.receive_into(beginning)
            self._stream.receive_summed(buffer[frames.LAST_BYTES :], total)
            total.update(beginning)
            checksum = total.intdigest()
        elif check.fill(self._stream.receive_parts(buffer)):
            return Status.HIT
        else:
            checksum = frames.payload_checksum(buffer)
        return Status.HIT if checksum == header.checksum else Status.DAMAGED

    def _shake_hands(self) -> int:
        """Return the size of the largest object that the server takes."""
        target, nonce = self._target, os.urandom(handshake.NONCE_BYTES)
        try:
            self._stream.send(
                handshake.encode_client_greeting(handshake.ClientGreeting(round(target.io_seconds * 1000), nonce))
            )
            first = self._stream.receive(handshake.MAGIC_BYTES)
            handshake.check_magic(first)  # at once: a foreign server may send fewer bytes than a greeting has
            rest = self._stream.receive(handshake.SERVER_GREETING_BYTES - handshake.MAGIC_BYTES)
            greeting = handshake.decode_server_greeting(first + rest)
            self._check(greeting.verdict, greeting.version)
            self._stream.send(handshake.client_proof(target.token, nonce, greeting.nonce))
            verdict, proof = handshake.decode_verdict(self._stream.receive(handshake.VERDICT_BYTES))
        except TimeoutError as error:
            raise problems.silent_server(target.address, target.io_seconds) from error
        except ConnectionError as error:
            raise problems.foreign_server(target.address, error) from error
        self._check(verdict, greeting.version)
        if not handshake.same_proof(proof, handshake.server_proof(target.token, nonce, greeting.nonce)):
            raise problems.other_token(target.address, target.token_variable)
        return greeting.max_object_bytes

    def _check(self, verdict: Verdict, version: int) -> None:
        address = self._target.address
        if verdict is Verdict.OTHER_VERSION or version != handshake.PROTOCOL_VERSION:
            raise problems.other_version(address, version, handshake.PROTOCOL_VERSION)
        if verdict is Verdict.TOO_MANY_CONNECTIONS:
            raise problems.too_many_connections(address)
        if verdict is Verdict.OTHER_TOKEN:
            raise problems.other_token(address, self._target.token_variable)


def _to_nobody(nbytes: int) -> None:
    """Take the number of bytes of a part, and do nothing."""


def _connect(target: Target) -> socket.socket:
    try:
        connection = socket.create_connection(target.address, target.connect_seconds)
    except OSError as error:
        raise problems.nobody_answers(target.address, error) from error
    if not target.insecure and not is_private(connection.getpeername()[0]):
        peer = connection.getpeername()[0]
        connection.close()
        raise problems.public_address(target.address, peer)
    return connection
