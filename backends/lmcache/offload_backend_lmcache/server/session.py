"""One connection of a client: the handshake, then one request after the other until the client leaves.

Nothing of the client is trusted: each length is bounded before memory is allocated, and each transfer has a deadline.
An object becomes visible only when its whole payload has arrived with the right checksum.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence

import xxhash

from offload_backend_lmcache.server.config import ServerConfig
from offload_backend_lmcache.server.object_store import ObjectStore, StoreError, Writing
from offload_backend_lmcache.wire import frames, handshake
from offload_backend_lmcache.wire.frames import Entry, Operation, RequestHeader, Status
from offload_backend_lmcache.wire.handshake import Verdict
from offload_backend_lmcache.wire.streams import Stream

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0
_WINDOW_OBJECTS = 16
_WINDOW_BYTES = 64 * 1024**2
_SCRATCH_BYTES = 256 * 1024


class Session:
    """The server's side of one connection.

    Args:
        stream: the connection.
        store: the objects.
        config: the module's config.
        token: the token that the client must know, empty without one.
        admit: called when the client has proved that it knows the token. Returns whether a connection is left for it.
    """

    def __init__(
        self, stream: Stream, store: ObjectStore, config: ServerConfig, token: bytes, admit: Callable[[], bool]
    ) -> None:
        self._stream = stream
        self._store = store
        self._config = config
        self._token = token
        self._admit = admit
        self._l2_seconds = config.l2_seconds
        self._eviction_seconds = config.eviction_seconds

    def run(self) -> None:
        """Serve the client until it leaves.

        Raises:
            OSError: the client left half-way, is too slow or breaks the protocol.
        """
        if not self._shake_hands():
            return
        while (header := self._next_request()) is not None:
            body = self._stream.receive(header.body_bytes)
            entries = frames.decode_entries(header, body, self._config.max_object)
            self._serve(header, entries)

    def _shake_hands(self) -> bool:
        content = self._stream.receive(handshake.CLIENT_GREETING_BYTES, HANDSHAKE_SECONDS)
        client = handshake.decode_client_greeting(content)
        nonce = os.urandom(handshake.NONCE_BYTES)
        if client.version != handshake.PROTOCOL_VERSION:
            self._greet(Verdict.OTHER_VERSION, nonce)
            return False
        self._greet(Verdict.ACCEPTED, nonce)
        proof = self._stream.receive(handshake.PROOF_BYTES, HANDSHAKE_SECONDS)
        if not handshake.same_proof(proof, handshake.client_proof(self._token, client.nonce, nonce)):
            self._refuse(Verdict.OTHER_TOKEN)
            return False
        if not self._admit():
            self._refuse(Verdict.TOO_MANY_CONNECTIONS)
            return False
        ours = handshake.server_proof(self._token, client.nonce, nonce)
        self._stream.send(handshake.encode_verdict(Verdict.ACCEPTED, ours))
        patience = client.patience_milliseconds / 1000 / 2
        self._l2_seconds = min(self._l2_seconds, patience)
        self._eviction_seconds = min(self._eviction_seconds, patience)
        return True

    def _greet(self, verdict: Verdict, nonce: bytes) -> None:
        self._stream.send(
            handshake.encode_server_greeting(handshake.ServerGreeting(verdict, nonce, self._config.max_object))
        )

    def _refuse(self, verdict: Verdict) -> None:
        self._stream.send(handshake.encode_verdict(verdict, bytes(handshake.PROOF_BYTES)))

    def _next_request(self) -> RequestHeader | None:
        """Return the next request, or ``None`` if the client has left or says nothing for too long."""
        try:
            first = self._stream.receive(1, self._config.idle_seconds)
        except (TimeoutError, ConnectionError):
            return None
        return frames.decode_request_header(first + self._stream.receive(frames.REQUEST_BYTES - 1))

    def _serve(self, header: RequestHeader, entries: Sequence[Entry]) -> None:
        try:
            if header.operation is Operation.LOAD:
                self._load(header.request_id, entries)
            else:
                body = self._body(header.operation, entries)
                self._stream.send(frames.encode_answer(header.operation, header.request_id, len(entries), body))
        except StoreError as error:
            self._stream.send(frames.encode_failure(header.request_id, str(error)))

    def _body(self, operation: Operation, entries: Sequence[Entry]) -> bytes:
        if operation is Operation.STORE:
            return bytes(self._receive_objects(entries))
        names = [entry.name for entry in entries]
        deadline = time.monotonic() + self._l2_seconds
        if operation is Operation.FIND:
            return frames.encode_found(self._store.find(names, deadline))
        return bytes(self._store.delete(names, deadline))

    def _load(self, request_id: int, entries: Sequence[Entry]) -> None:
        """Send the objects, window by window, so that only a few are pinned at a time."""
        index = 0
        for window in _windows(entries):
            with self._store.reading(window, time.monotonic() + self._l2_seconds) as contents:
                for entry, content in zip(window, contents, strict=True):
                    header = frames.encode_object(
                        content.status, index, request_id, entry.name, len(content.payload), content.checksum
                    )
                    self._stream.send(header, content.payload)
                    index += 1

    def _receive_objects(self, entries: Sequence[Entry]) -> list[Status]:
        """Receive all payloads of a request, also those that cannot be stored.

        A failure of the storage is raised after the last payload, because the client reads the answer only then.
        """
        statuses: list[Status] = []
        failure: StoreError | None = None
        present: set[bytes] = set()
        try:
            present = self._present([entry.name for entry in entries])
        except StoreError as error:
            failure = error
        eviction_deadline = time.monotonic() + self._eviction_seconds
        for entry in entries:
            writing: Writing | Status = Status.PRESENT if entry.name in present else Status.FULL
            if failure is None and entry.name not in present:
                try:
                    writing = self._store.begin_write(entry, eviction_deadline)
                except StoreError as error:
                    failure = error
            if isinstance(writing, Status):
                self._discard(entry.nbytes)
                statuses.append(writing)
            else:
                statuses.append(self._receive_object(writing))
        if failure is not None:
            raise failure
        return statuses

    def _present(self, names: Sequence[bytes]) -> set[bytes]:
        """Return the objects that exist, in an L2 too: a new copy in L1 may be evicted and show the older one again."""
        found = self._store.find(names, time.monotonic() + self._l2_seconds)
        return {name for name, one in zip(names, found, strict=True) if one.present}

    def _receive_object(self, writing: Writing) -> Status:
        committed = False
        try:
            total = xxhash.xxh3_64()
            self._stream.receive_summed(writing.payload[frames.LAST_BYTES :], total)
            self._stream.receive_summed(writing.payload[: frames.LAST_BYTES], total)
            checksum = total.intdigest()
            if frames.decode_checksum(self._stream.receive(frames.CHECKSUM_BYTES)) != checksum:
                return Status.DAMAGED
            committed = True
            return Status.STORED if writing.commit(checksum) else Status.FULL
        finally:
            if not committed:
                writing.abort()

    def _discard(self, nbytes: int) -> None:
        """Read a payload that is not stored, and its checksum."""
        nbytes += frames.CHECKSUM_BYTES
        scratch = memoryview(bytearray(min(nbytes, _SCRATCH_BYTES)))
        while nbytes:
            part = scratch[: min(nbytes, len(scratch))]
            self._stream.receive_into(part)
            nbytes -= len(part)


def _windows(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """Divide a request into parts of a few objects and bytes, at least one object each.

    No part has one object in two sizes, because it can be loaded from an L2 in one size only.
    """
    start = total = 0
    sizes: dict[bytes, int] = {}
    for index, entry in enumerate(entries):
        total += entry.nbytes
        is_full = index - start >= _WINDOW_OBJECTS or total > _WINDOW_BYTES
        if index > start and (is_full or sizes.get(entry.name, entry.nbytes) != entry.nbytes):
            yield entries[start:index]
            start, total = index, entry.nbytes
            sizes.clear()
        sizes[entry.name] = entry.nbytes
    yield entries[start:]
