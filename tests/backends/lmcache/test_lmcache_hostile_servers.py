"""The client against servers that lie, stop, talk without end or speak another protocol."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offload_backend_lmcache.wire import frames, handshake
from offload_backend_lmcache.wire.frames import Entry, Operation, RequestHeader, Status
from offload_backend_lmcache.wire.handshake import ServerGreeting, Verdict

from offload_core.api.backend import LoadOutcome
from offload_core.testing.rig.recording_check import RecordingCheck
from tests.backends.lmcache.calls import key, opened
from tests.support.damage import flipped

MIB = 1024**2
PAYLOAD = b"\x5a" * 5000
UNTOUCHED = b"\xa5" * len(PAYLOAD)
IO_SECONDS = 0.4
"""Deadline of a call that a server lets run into it."""
HONEST_SECONDS = 30.0


class Peer:
    """The server's end of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def receive(self, nbytes: int) -> bytes:
        content = b""
        while len(content) < nbytes:
            if not (more := self.socket.recv(nbytes - len(content))):
                raise ConnectionError
            content += more
        return content

    def shake_hands(self, verdict: Verdict = Verdict.ACCEPTED, proof: bytes | None = None) -> None:
        client = handshake.decode_client_greeting(self.receive(handshake.CLIENT_GREETING_BYTES))
        nonce = b"s" * handshake.NONCE_BYTES
        self.socket.sendall(handshake.encode_server_greeting(ServerGreeting(verdict, nonce, 64 * MIB)))
        self.receive(handshake.PROOF_BYTES)
        ours = handshake.server_proof(b"", client.nonce, nonce) if proof is None else proof
        self.socket.sendall(handshake.encode_verdict(Verdict.ACCEPTED, ours))

    def request(self) -> tuple[RequestHeader, list[Entry]]:
        header = frames.decode_request_header(self.receive(frames.REQUEST_BYTES))
        return header, frames.decode_entries(header, self.receive(header.body_bytes), 64 * MIB)


Script = Callable[[Peer], None]


@contextmanager
def served(script: Script) -> Iterator[str]:
    """Run a script for each connection, one after the other, and then close the connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.settimeout(5)
            with connection, suppress(OSError):
                script(Peer(connection))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)
        assert not thread.is_alive(), "a script did not end"


def answers(respond: Callable[[RequestHeader, list[Entry]], bytes], is_left_open: bool = False) -> Script:
    """Return a script that answers each request with the bytes that ``respond`` returns."""

    def script(peer: Peer) -> None:
        peer.shake_hands()
        while True:
            header, entries = peer.request()
            if header.operation is Operation.STORE:
                peer.receive(sum(entry.nbytes + frames.CHECKSUM_BYTES for entry in entries))
            peer.socket.sendall(respond(header, entries))
            if not is_left_open:
                return

    return script


def hit(header: RequestHeader, entry: Entry, payload: bytes = PAYLOAD, **other: int) -> bytes:
    """Return a right answer to a load, or one with other fields."""
    fields = {"index": 0, "request_id": header.request_id, "nbytes": len(payload)} | other
    status = Status.HIT
    return (
        frames.encode_object(status, name=entry.name, payload_checksum=frames.payload_checksum(payload), **fields)
        + payload
    )


def load(address: str, io_seconds: float = IO_SECONDS) -> tuple[LoadOutcome | OSError, bytes, float]:
    """Return the outcome, the buffer and the seconds of a load."""
    buffer = bytearray(UNTOUCHED)
    with opened(address, io_timeout_seconds=io_seconds) as calls:
        began = time.monotonic()
        try:
            ((outcome, _),) = calls.load_into((1, buffer))
        except OSError as error:
            return error, bytes(buffer), time.monotonic() - began
        return outcome, bytes(buffer), time.monotonic() - began


def test_an_honest_answer() -> None:
    with served(answers(lambda header, entries: hit(header, entries[0]))) as address:
        assert load(address, HONEST_SECONDS)[:2] == (LoadOutcome.HIT, PAYLOAD)


LIES: dict[str, Callable[[RequestHeader, list[Entry]], bytes]] = {
    "another key": lambda header, entries: hit(header, Entry(b"another")),
    "another request": lambda header, entries: hit(header, entries[0], request_id=header.request_id + 1),
    "another index": lambda header, entries: hit(header, entries[0], index=1),
    "short": lambda header, entries: hit(header, entries[0], PAYLOAD[:-1]),
    "long": lambda header, entries: hit(header, entries[0], PAYLOAD + b"x"),
    "huge": lambda header, entries: hit(header, entries[0], nbytes=2**63),
    "of another operation": lambda header, entries: frames.encode_answer(Operation.STORE, header.request_id, 1, b"\4"),
    "another status": lambda header, entries: frames.encode_object(
        Status.STORED, 0, header.request_id, entries[0].name, 0, 0
    ),
    "closed at once": lambda header, entries: b"",
    "closed in the header": lambda header, entries: hit(header, entries[0])[:20],
    "closed in the payload": lambda header, entries: hit(header, entries[0])[:-1],
    "nonsense": lambda header, entries: b"\0" * 10_000,
    "the request itself": lambda header, entries: frames.encode_request(Operation.LOAD, header.request_id, entries) * 9,
    "a huge message": lambda header, entries: frames._encode_answer(
        frames.AnswerHeader(frames.Kind.FAILURE, 0, 0, header.request_id, 2**40, 0, 0)
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_wrong_answer_is_an_error(lie: str) -> None:
    with served(answers(LIES[lie])) as address:
        outcome, buffer, seconds = load(address)
    assert isinstance(outcome, OSError), f"a load ended as {outcome}"
    assert "127.0.0.1" in str(outcome), "the message does not name the address"
    assert buffer == UNTOUCHED or lie == "closed in the payload", "a refused answer has written the buffer"
    assert seconds < 10 * IO_SECONDS


def test_wrong_bytes_under_a_right_header_are_corrupt() -> None:
    def lie(header: RequestHeader, entries: list[Entry]) -> bytes:
        return hit(header, entries[0])[: -len(PAYLOAD)] + PAYLOAD[:-1] + b"x"

    with served(answers(lie)) as address:
        assert load(address, HONEST_SECONDS)[0] is LoadOutcome.CORRUPT


@pytest.mark.parametrize("is_found_right", [True, False])
def test_a_check_that_finds_an_object_right_stands_for_its_checksum(is_found_right: bool) -> None:
    changed = flipped(PAYLOAD)

    def lie(header: RequestHeader, entries: list[Entry]) -> bytes:
        damaged, empty = flipped(hit(header, entries[1], index=1)), hit(header, entries[2], b"", index=2)
        return hit(header, entries[0]) + damaged + empty

    with served(answers(lie)) as address, opened(address) as calls:
        right = changed if is_found_right else None
        outcomes = calls.load_and_check((1, len(PAYLOAD)), (2, len(PAYLOAD)), (3, 0), right=right)
    found = LoadOutcome.HIT if is_found_right else LoadOutcome.CORRUPT
    assert outcomes == [(LoadOutcome.HIT, PAYLOAD), (found, changed), (LoadOutcome.HIT, b"")]


def test_after_a_break_a_right_object_is_not_read_again_and_a_check_is_told_of_the_first_read_only() -> None:
    requests: list[int] = []
    views = [memoryview(bytearray(len(PAYLOAD))) for _ in range(3)]
    checks = [RecordingCheck(view, PAYLOAD) for view in views]

    def script(peer: Peer) -> None:
        peer.shake_hands()
        while True:
            header, entries = peer.request()
            requests.append(len(entries))
            payload = flipped(PAYLOAD) if len(requests) == 3 else PAYLOAD
            answer = b"".join(hit(header, entry, payload, index=index) for index, entry in enumerate(entries))
            peer.socket.sendall(answer[: -len(PAYLOAD) - 1000] if len(requests) == 2 else answer)
            if len(requests) == 2:
                return

    async def load_all() -> None:
        outcomes = await calls.backend.load_and_check([key(1), key(2), key(3)], views, checks)
        assert outcomes == [LoadOutcome.HIT] * 3

    with served(script) as address, opened(address, connections=1) as calls:
        assert calls.load(4, len(PAYLOAD)) == (LoadOutcome.HIT, PAYLOAD)
        calls.run(load_all())
    assert requests == [1, 3, 2]
    assert [bytes(view) for view in views] == [PAYLOAD, flipped(PAYLOAD), flipped(PAYLOAD)], "it was read again"
    assert [bytes(check.told) for check in checks] == [PAYLOAD, b"", flipped(PAYLOAD)]
    assert [check.problem for check in checks] == [None] * 3


def test_a_miss_leaves_the_buffer_and_a_damaged_object_is_corrupt() -> None:
    for status, outcome in ((Status.ABSENT, LoadOutcome.MISS), (Status.DAMAGED, LoadOutcome.CORRUPT)):

        def answer(header: RequestHeader, entries: list[Entry], status: Status = status) -> bytes:
            return frames.encode_object(status, 0, header.request_id, entries[0].name, 0, 0)

        with served(answers(answer)) as address:
            assert load(address, HONEST_SECONDS)[:2] == (outcome, UNTOUCHED)


def test_bytes_after_an_answer_do_not_become_the_next_answer() -> None:
    def talkative(header: RequestHeader, entries: list[Entry]) -> bytes:
        forged = hit(header, Entry(f"{key(2).path}".encode()), b"\x66" * 5000, request_id=header.request_id + 1)
        return hit(header, entries[0]) + forged

    with served(answers(talkative)) as address, opened(address, io_timeout_seconds=IO_SECONDS) as calls:
        assert calls.load(1, 5000) == (LoadOutcome.HIT, PAYLOAD)
        outcome, content = calls.load(2, 5000)
        assert (outcome, content) == (LoadOutcome.HIT, PAYLOAD), "bytes that were sent in advance were taken"


@pytest.mark.parametrize("pause", [None, 0.05], ids=["silent", "trickles"])
def test_a_server_that_stops_or_trickles_times_out(pause: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload_backend_lmcache.wire.streams.MIN_BYTES_PER_SECOND", 10_000)
    ended = threading.Event()

    def script(peer: Peer) -> None:
        peer.shake_hands()
        header, entries = peer.request()
        for byte in hit(header, entries[0]):
            if ended.wait(20 if pause is None else pause):
                return
            peer.socket.sendall(bytes([byte]))

    with served(script) as address:
        try:
            outcome, _, seconds = load(address)
        finally:
            ended.set()
    assert isinstance(outcome, TimeoutError)
    assert "did not answer in time" in str(outcome)
    assert seconds < IO_SECONDS + 5000 / 10_000 + 3, "a server that trickles holds the call"


def test_a_server_that_reads_nothing_times_out() -> None:
    ended = threading.Event()

    def script(peer: Peer) -> None:
        peer.shake_hands()
        ended.wait(20)

    with served(script) as address, opened(address, io_timeout_seconds=IO_SECONDS) as calls:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            calls.store((1, bytes(64 * MIB)))
        assert time.monotonic() - began < 64 + 10 * IO_SECONDS
        ended.set()


@settings(max_examples=60, deadline=None)
@given(garbage=st.binary(max_size=400), is_answer=st.booleans(), operation=st.sampled_from(Operation))
def test_any_answer_is_an_error_or_a_miss_never_other_bytes(
    garbage: bytes, is_answer: bool, operation: Operation
) -> None:
    def respond(header: RequestHeader, entries: list[Entry]) -> bytes:
        return frames.encode_answer(header.operation, header.request_id, 1, garbage) if is_answer else garbage

    with served(answers(respond)) as address, opened(address, io_timeout_seconds=IO_SECONDS) as calls:
        buffer = bytearray(UNTOUCHED)
        with suppress(OSError):
            match operation:
                case Operation.FIND:
                    assert list(calls.contains(1)) in ([True], [False])
                case Operation.LOAD:
                    ((outcome, content),) = calls.load_into((1, buffer))
                    assert (outcome, content) != (LoadOutcome.HIT, PAYLOAD), "nobody has sent the payload"
                case Operation.STORE:
                    calls.store((1, PAYLOAD))
                case Operation.DELETE:
                    calls.delete(1)
        if operation is Operation.LOAD:
            assert buffer == UNTOUCHED, "garbage was written to the buffer"


def open_error(script: Script) -> OSError:
    with (
        served(script) as address,
        pytest.raises(OSError, match=re.escape(address)) as caught,
        opened(address, io_timeout_seconds=IO_SECONDS),
    ):
        pass
    return caught.value


FOREIGN = {
    "HTTP": b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n",
    "ZMQ": b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48),
    "gRPC": b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x05\x00\x00\x40\x00",
    "closes": b"",
    "short": b"OCLM\r\n",
    "a damaged greeting": b"OCLM\r\n\r\n" + bytes(100),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_server_is_named_with_the_cure(name: str) -> None:
    def script(peer: Peer) -> None:
        peer.receive(handshake.CLIENT_GREETING_BYTES)
        peer.socket.sendall(FOREIGN[name])

    text = str(open_error(script))
    assert "but not offload-core's module of LMCache" in text
    assert """lmcache server --l1-size-gb 20 --eviction-policy LRU --server-module '{"module_path": """ in text


def test_a_silent_server_is_named_as_such() -> None:
    def script(peer: Peer) -> None:
        with suppress(OSError):
            peer.receive(10_000)

    error = open_error(script)
    assert isinstance(error, TimeoutError)
    assert "accepts connections, but did not answer within 0.4 s; it hangs or is overloaded" in str(error)


def test_a_server_that_does_not_prove_its_token_is_refused() -> None:
    error = open_error(lambda peer: peer.shake_hands(proof=bytes(handshake.PROOF_BYTES)))
    assert isinstance(error, PermissionError)
    assert "has another token than this tier" in str(error)


def test_a_dead_server_is_named_with_the_command_that_starts_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionRefusedError) as caught, opened(f"127.0.0.1:{port}"):
        pass
    assert str(caught.value).startswith(
        f"[Errno 111] no server at 127.0.0.1:{port} (Connection refused); start it with: lmcache server "
    )


def test_a_name_that_resolves_to_a_public_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload_backend_lmcache.client.connection.is_private", lambda host: False)
    problem = pytest.raises(PermissionError, match="a public address; the traffic is not encrypted")
    with served(lambda peer: None) as address, problem, opened(address):
        pass


def test_a_kept_connection_that_breaks_is_replaced_once() -> None:
    connections = []

    def script(peer: Peer) -> None:
        connections.append(peer)
        peer.shake_hands()
        for _ in range(1 if len(connections) == 1 else 9):
            header, entries = peer.request()
            peer.socket.sendall(hit(header, entries[0]))
        peer.request()  # and no answer

    with served(script) as address, opened(address) as calls:
        assert calls.load(1, len(PAYLOAD)) == (LoadOutcome.HIT, PAYLOAD)
        assert calls.load(1, len(PAYLOAD)) == (LoadOutcome.HIT, PAYLOAD), "a broken connection is an error at once"
    assert len(connections) == 2


def test_a_server_that_breaks_each_connection_is_an_error() -> None:
    def script(peer: Peer) -> None:
        peer.shake_hands()
        peer.request()

    with served(script) as address, opened(address) as calls, pytest.raises(OSError, match="was lost"):
        calls.load(1, len(PAYLOAD))
