"""The module's side of the protocol against clients that lie, stop, leave or come in masses. LMCache is not needed."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from offload_backend_lmcache.client.connection import Connection, Target
from offload_backend_lmcache.server.listener import Listener
from offload_backend_lmcache.wire import frames, handshake
from offload_backend_lmcache.wire.addresses import parse_address
from offload_backend_lmcache.wire.frames import Entry, Operation, Status
from offload_backend_lmcache.wire.streams import Stream

from tests.backends.lmcache.calls import opened, sent
from tests.backends.lmcache.shelf import Shelf, listening
from tests.support.polling import wait_until

PAYLOAD = bytes(range(256)) * 16 + bytes(1000)
NONCE = b"n" * handshake.NONCE_BYTES


class Raw:
    """A client that may send anything."""

    def __init__(self, address: str, token: bytes = b"") -> None:
        self.socket = socket.create_connection(parse_address(address), timeout=5)
        self._token = token

    def shake_hands(self) -> Raw:
        self.prove()
        self.receive(handshake.VERDICT_BYTES)
        return self

    def prove(self) -> None:
        """Do the client's part of the handshake, without the server's verdict."""
        self.socket.sendall(handshake.encode_client_greeting(handshake.ClientGreeting(5000, NONCE)))
        greeting = handshake.decode_server_greeting(self.receive(handshake.SERVER_GREETING_BYTES))
        self.socket.sendall(handshake.client_proof(self._token, NONCE, greeting.nonce))

    def receive(self, nbytes: int) -> bytes:
        content = b""
        while len(content) < nbytes and (more := self.socket.recv(nbytes - len(content))):
            content += more
        return content

    def is_closed(self) -> bool:
        """Return whether the server closes the connection without a further byte."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def server(shelf: Shelf) -> Iterator[tuple[str, Listener]]:
    with listening(shelf, max_object="1MiB", transfer_seconds=0.3, max_connections=4) as server:
        yield server


def is_alive(address: str) -> bool:
    with opened(address) as calls:
        calls.store((1, PAYLOAD))
        return calls.load(1, len(PAYLOAD))[1] == PAYLOAD


def store_request(name: bytes = b"half", payload: bytes = PAYLOAD) -> bytes:
    return frames.encode_request(Operation.STORE, 1, [Entry(name, len(payload))])


@pytest.mark.parametrize("content", [b"GET / HTTP/1.1\r\n\r\n" * 4, b"\xff" + bytes(63), bytes(64)])
def test_a_foreign_client_is_left(server: tuple[str, Listener], content: bytes) -> None:
    raw = Raw(server[0])
    raw.socket.sendall(content)
    assert raw.is_closed(), "the server goes on with a client of another protocol"
    raw.close()
    assert is_alive(server[0])


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(min_size=1, max_size=300))
def test_any_bytes_after_the_handshake_end_the_connection(server: tuple[str, Listener], content: bytes) -> None:
    raw = Raw(server[0]).shake_hands()
    with contextlib.suppress(OSError):  # the server may have ended it
        raw.socket.sendall(content)
        raw.socket.shutdown(socket.SHUT_WR)
    assert raw.is_closed(), "the server answers a request that nobody made"
    raw.close()
    wait_until(lambda: server[1].connections == 0, "the connection of a client that has left is kept")


def test_a_client_that_says_nothing_in_its_handshake_or_request_is_left(
    server: tuple[str, Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    half = Raw(server[0]).shake_hands()
    monkeypatch.setattr("offload_backend_lmcache.server.session.HANDSHAKE_SECONDS", 0.2)
    silent = Raw(server[0])
    half.socket.sendall(store_request()[:10])
    assert silent.is_closed()
    assert half.is_closed()
    silent.close()
    half.close()
    monkeypatch.undo()
    assert is_alive(server[0])


@pytest.mark.parametrize("nbytes", [0, 1, len(PAYLOAD) - 1, len(PAYLOAD), len(PAYLOAD) + 7])
@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "stops"])
def test_a_writer_that_ends_half_way_leaves_nothing(
    server: tuple[str, Listener], shelf: Shelf, nbytes: int, leaves: bool
) -> None:
    raw = Raw(server[0]).shake_hands()
    raw.socket.sendall(store_request() + sent(PAYLOAD)[:nbytes])
    wait_until(lambda: shelf.begun == 1, "the server has not begun")
    if leaves:
        raw.close()
    wait_until(lambda: shelf.writing == 0, "the memory of half an object is kept")
    assert not shelf.objects, "half an object is visible"
    raw.close()


def test_a_payload_with_another_checksum_is_not_stored(server: tuple[str, Listener], shelf: Shelf) -> None:
    raw = Raw(server[0]).shake_hands()
    raw.socket.sendall(store_request() + sent(PAYLOAD)[: -frames.CHECKSUM_BYTES] + frames.encode_checksum(1))
    answer = raw.receive(frames.ANSWER_BYTES + 1)
    assert answer[-1] == Status.DAMAGED
    assert not shelf.objects
    assert shelf.writing == 0
    raw.close()


def test_an_object_above_the_limit_ends_the_connection_before_memory_is_taken(server: tuple[str, Listener]) -> None:
    raw = Raw(server[0]).shake_hands()
    raw.socket.sendall(frames.encode_request(Operation.STORE, 1, [Entry(b"large", 1024**2 + 1)]))
    assert raw.is_closed()
    raw.close()


def test_a_client_rejects_what_is_too_large_for_the_server(server: tuple[str, Listener]) -> None:
    with opened(server[0]) as calls:
        outcomes = calls.store((1, PAYLOAD), (2, bytes(1024**2 + 1)), (3, PAYLOAD))
        assert [outcome.value for outcome in outcomes] == ["stored", "rejected", "stored"]
        assert calls.load(2, 1024**2 + 1)[0].value == "miss"


def test_a_reader_that_takes_nothing_is_left(server: tuple[str, Listener], shelf: Shelf) -> None:
    shelf.objects = {b"%d" % number: (bytes(1024**2), 0) for number in range(64)}
    raw = Raw(server[0])
    raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.shake_hands()
    entries = [Entry(name, 1024**2) for name in shelf.objects]
    raw.socket.sendall(frames.encode_request(Operation.LOAD, 1, entries))
    wait_until(lambda: server[1].connections == 0, "objects stay pinned for a reader that does not read")
    raw.close()


def test_clients_without_the_token_take_no_connection_from_those_with_it(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KV_TOKEN", "secret")
    monkeypatch.setattr("offload_backend_lmcache.server.session.HANDSHAKE_SECONDS", 60.0)
    with listening(shelf, token_variable="KV_TOKEN", max_connections=4) as (address, listener):
        three = [Raw(address, b"secret").shake_hands() for _ in range(3)]
        silent = [Raw(address) for _ in range(6)]
        assert all(raw.is_closed() for raw in silent[:2]), "the oldest silent connections stay"
        with opened(address, token="secret") as calls:
            assert list(calls.contains(1)) == [False]
        assert listener.connections <= 4 + 4
        for raw in three + silent:
            raw.close()
        wait_until(lambda: listener.connections == 0, "the connection of a client that has left is kept")


def test_a_connection_that_was_closed_for_another_takes_no_place_by_a_late_proof(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit, shut_down = Listener._admit, Stream.shut_down
    is_proved, is_closed = threading.Event(), threading.Event()
    admitted: list[bool] = []

    def admitting(listener: Listener, stream: Stream) -> bool:
        is_proved.set()
        assert is_closed.wait(20)
        admitted.append(admit(listener, stream))
        return admitted[-1]

    def shutting_down(stream: Stream) -> None:
        shut_down(stream)
        is_closed.set()

    monkeypatch.setattr(Listener, "_admit", admitting)
    monkeypatch.setattr(Stream, "shut_down", shutting_down)
    with listening(shelf, max_connections=1) as (address, _):
        first = Raw(address)
        first.prove()
        assert is_proved.wait(20)
        second = Raw(address).shake_hands()
        assert admitted == [False, True]
        first.close()
        second.close()


def test_connections_beyond_the_limit_are_refused_with_the_cure(server: tuple[str, Listener]) -> None:
    four = [Raw(server[0]).shake_hands() for _ in range(4)]
    with pytest.raises(OSError, match="has no connection left; raise max_connections in its config"), opened(server[0]):
        pass
    for raw in four:
        raw.close()
    wait_until(lambda: server[1].connections == 0, "the connection of a client that has left is kept")
    assert is_alive(server[0])


def test_a_thread_that_does_not_start_costs_one_connection(
    server: tuple[str, Listener], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, failures = threading.Thread.start, iter(range(3))

    def starting(thread: threading.Thread) -> None:
        if thread.name == "offload-session" and next(failures, None) is not None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    for _ in range(3):
        raw = Raw(server[0])
        assert raw.is_closed()
        raw.close()
    assert server[1].connections == 0, "a connection without a thread counts"
    assert is_alive(server[0]), "the module accepts nobody any more"
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "offload-core's module cannot serve a new connection: can't start new thread"
    ]


def test_a_shortage_of_open_files_is_logged_once(
    server: tuple[str, Listener], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept, failures = socket.socket.accept, iter(range(3))

    def accepting(listening: socket.socket) -> tuple[socket.socket, Any]:
        if next(failures, None) is not None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", accepting)
    assert is_alive(server[0])  # by the accept that had begun
    assert is_alive(server[0])
    assert len(caplog.records) == 1


def test_an_idle_connection_ends_and_the_client_makes_another(shelf: Shelf) -> None:
    with listening(shelf, idle_seconds=1) as (address, listener), opened(address) as calls:
        calls.store((1, PAYLOAD))
        wait_until(lambda: listener.connections == 0, "an idle connection is kept for ever")
        assert calls.load(1, len(PAYLOAD))[1] == PAYLOAD


def test_a_failure_of_the_storage_is_the_failure_of_a_request_not_of_the_connection(
    server: tuple[str, Listener], shelf: Shelf
) -> None:
    with opened(server[0]) as calls:
        for work in (
            lambda: calls.contains(1),
            lambda: calls.load(1, 5),
            lambda: calls.store((1, PAYLOAD), (2, PAYLOAD)),
            lambda: calls.delete(1),
        ):
            shelf.failure = "LMCache's L2 did not answer\x1b[31m"
            with pytest.raises(OSError, match=r"failed: LMCache's L2 did not answer\?\[31m; its log tells more"):
                work()
            shelf.failure = None
            assert list(calls.contains(1)) == [False]
        assert server[1].connections == 1


def test_no_room_is_a_rejection(server: tuple[str, Listener], shelf: Shelf) -> None:
    shelf.is_full = True
    with opened(server[0]) as calls:
        assert [outcome.value for outcome in calls.store((1, PAYLOAD), (2, PAYLOAD))] == ["rejected", "rejected"]


@pytest.mark.parametrize(("ours", "theirs"), [("", "one"), ("one", ""), ("one", "two")])
def test_another_token_is_refused_on_both_sides(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, ours: str, theirs: str
) -> None:
    monkeypatch.setenv("KV_TOKEN", theirs)
    config = {"token_variable": "KV_TOKEN"} if theirs else {}
    with listening(shelf, **config) as (address, _):
        cure = "has another token than this tier, or only one of the two has one; set OFFLOAD_CORE_CLUSTER_TOKEN"
        with pytest.raises(PermissionError, match=cure), opened(address, token=ours or None):
            pass


def test_the_same_token_on_both_sides(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_TOKEN", "secret")
    with listening(shelf, token_variable="KV_TOKEN") as (address, _), opened(address, token="secret") as calls:
        assert list(calls.contains(1)) == [False]


def test_a_request_without_the_proof_of_the_token_is_not_read(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_TOKEN", "secret")
    with listening(shelf, token_variable="KV_TOKEN") as (address, _):
        raw = Raw(address)
        greeting = handshake.encode_client_greeting(handshake.ClientGreeting(5000, NONCE))
        raw.socket.sendall(greeting + bytes(handshake.PROOF_BYTES) + store_request() + sent(PAYLOAD))
        with contextlib.suppress(ConnectionError):
            raw.receive(1000)
        raw.close()
    assert not shelf.objects, "a client without the token has stored an object"


def test_another_version_is_refused_with_both_versions(
    server: tuple[str, Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = handshake.encode_client_greeting
    monkeypatch.setattr(handshake, "encode_client_greeting", lambda greeting: encode(greeting._replace(version=3)))
    target = Target(parse_address(server[0]), 1, 1, b"", "TOKEN", insecure=False)
    with pytest.raises(OSError, match=r"speaks version 2 of the protocol, .*; install the same version"):
        Connection(target)


def test_close_ends_connections_and_the_address_is_free_again(shelf: Shelf, tmp_path: Path) -> None:
    with listening(shelf) as (address, listener), opened(address) as calls:
        calls.store((1, PAYLOAD))
        listener.close()
        assert listener.connections == 0
        with pytest.raises(ConnectionRefusedError, match="no server at"):
            calls.contains(1)
        again = Listener(shelf, listener._config)
        assert list(calls.contains(1)) == [True]
        again.close()
