"""Every parser of the protocol takes any bytes. It returns the values that were encoded, or raises an error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from offload_backend_lmcache.wire import frames, handshake
from offload_backend_lmcache.wire.frames import AnswerHeader, Entry, Found, Kind, Operation, ProtocolError, Status
from offload_backend_lmcache.wire.handshake import ClientGreeting, ServerGreeting, Verdict

MIB = 1024**2
U64 = st.integers(0, 2**64 - 1)
ENTRIES = st.lists(st.builds(Entry, st.binary(min_size=1, max_size=40), st.integers(0, MIB)), min_size=1)
FOUND = st.lists(st.just(Found(False, None)) | st.builds(Found, st.just(True), st.none() | st.integers(0, 2**64 - 2)))


def split(request: bytes) -> tuple[bytes, bytes]:
    return request[: frames.REQUEST_BYTES], request[frames.REQUEST_BYTES :]


def parse_request(request: bytes) -> tuple[frames.RequestHeader, list[Entry]]:
    head, body = split(request)
    header = frames.decode_request_header(head)
    return header, frames.decode_entries(header, body, MIB)


@given(st.sampled_from(Operation), U64, ENTRIES)
def test_a_request_is_read_as_it_was_written(operation: Operation, request_id: int, entries: list[Entry]) -> None:
    header, found = parse_request(frames.encode_request(operation, request_id, entries))
    assert (header.operation, header.request_id, found) == (operation, request_id, entries)


@given(FOUND)
def test_what_was_found_is_read_as_it_was_written(found: list[Found]) -> None:
    assert frames.decode_found(frames.encode_found(found), len(found)) == found


@given(st.sampled_from(Status), st.integers(0, 1023), U64, st.binary(max_size=64), U64, U64)
def test_an_object_is_read_as_it_was_written(
    status: Status, index: int, request_id: int, name: bytes, nbytes: int, checksum: int
) -> None:
    header = frames.decode_answer_header(frames.encode_object(status, index, request_id, name, nbytes, checksum))
    assert header == AnswerHeader(Kind.OBJECT, status, index, request_id, nbytes, frames.checksum(name), checksum)


@given(st.integers(0, 2**32 - 1), st.binary(min_size=16, max_size=16), st.integers(0, 65535), U64)
def test_greetings_are_read_as_they_were_written(patience: int, nonce: bytes, version: int, nbytes: int) -> None:
    client = ClientGreeting(patience, nonce, version)
    assert handshake.decode_client_greeting(handshake.encode_client_greeting(client)) == client
    server = ServerGreeting(Verdict.ACCEPTED, nonce, nbytes, version)
    assert handshake.decode_server_greeting(handshake.encode_server_greeting(server)) == server


WHOLE = {
    "request": (parse_request, frames.encode_request(Operation.STORE, 7, [Entry(b"one", 5), Entry(b"two", 6)])),
    "answer": (
        lambda content: frames.decode_answer_header(content),
        frames.encode_object(Status.HIT, 1, 7, b"one", 5, 9),
    ),
    "client greeting": (
        handshake.decode_client_greeting,
        handshake.encode_client_greeting(ClientGreeting(5000, b"n" * 16)),
    ),
    "server greeting": (
        handshake.decode_server_greeting,
        handshake.encode_server_greeting(ServerGreeting(Verdict.ACCEPTED, b"n" * 16, MIB)),
    ),
}


@pytest.mark.parametrize("name", WHOLE)
@given(st.data())
def test_one_changed_byte_is_noticed(name: str, data: st.DataObject) -> None:
    parse, content = WHOLE[name]
    place = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ProtocolError):
        parse(bytes(changed))


@pytest.mark.parametrize("name", WHOLE)
@given(st.data())
def test_a_frame_of_another_length_is_noticed(name: str, data: st.DataObject) -> None:
    parse, content = WHOLE[name]
    with pytest.raises(ProtocolError):
        parse(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(ProtocolError):
        parse(content + data.draw(st.binary(min_size=1, max_size=40)))


PARSERS: list[Callable[[bytes], Any]] = [
    frames.decode_request_header,
    frames.decode_answer_header,
    handshake.decode_client_greeting,
    handshake.decode_server_greeting,
    handshake.decode_verdict,
    lambda content: frames.decode_found(content, 3),
    lambda content: frames.decode_statuses(Operation.STORE, content),
]


@given(st.sampled_from(PARSERS), st.binary(max_size=128), st.booleans())
def test_any_bytes_are_a_value_or_a_protocol_error(
    parse: Callable[[bytes], Any], content: bytes, is_sealed: bool
) -> None:
    with contextlib.suppress(ProtocolError):
        parse(frames.sealed(content) if is_sealed else content)


@given(st.integers(0, 2000), st.integers(0, 2**32 - 1), st.binary(max_size=100))
def test_a_sealed_request_with_any_numbers_is_bounded(count: int, body_bytes: int, body: bytes) -> None:
    header = frames._REQUEST.pack(frames._REQUEST_MAGIC, Operation.FIND, count, 1, body_bytes, frames.checksum(body))
    try:
        parsed = frames.decode_request_header(frames.sealed(header))
        most = frames.MAX_ENTRIES * (frames._ENTRY.size + frames.MAX_NAME_BYTES)
        assert parsed.body_bytes <= most, "memory for the body would have no bound"
        entries = frames.decode_entries(parsed, body, MIB)
    except ProtocolError:
        return
    assert len(entries) == count, "as many objects as the header says"


@given(st.lists(st.tuples(st.integers(0, 65535), U64), min_size=1, max_size=20), st.binary(max_size=200))
def test_entries_whose_lengths_lie_are_refused(lengths: list[tuple[int, int]], names: bytes) -> None:
    body = b"".join(frames._ENTRY.pack(name_bytes, nbytes) + names for name_bytes, nbytes in lengths)
    header = frames.RequestHeader(Operation.FIND, len(lengths), 1, len(body), frames.checksum(body))
    try:
        entries = frames.decode_entries(header, body, MIB)
    except ProtocolError:
        return
    assert all(1 <= len(entry.name) <= frames.MAX_NAME_BYTES and entry.nbytes <= MIB for entry in entries)


def test_a_request_that_nobody_may_send() -> None:
    with pytest.raises(ValueError, match="holds 1 to 1024"):
        frames.encode_request(Operation.FIND, 1, [])
    with pytest.raises(ValueError, match="holds 1 to 1024"):
        frames.encode_request(Operation.FIND, 1, [Entry(b"a")] * 1025)
    with pytest.raises(ValueError, match="1 to 512 bytes"):
        frames.encode_request(Operation.FIND, 1, [Entry(b"a" * 513)])


def test_a_status_of_another_operation_is_refused() -> None:
    with pytest.raises(ProtocolError, match="status STORED in answer to DELETE"):
        frames.decode_statuses(Operation.DELETE, bytes([Status.STORED]))


def test_a_message_has_a_limit() -> None:
    failure = frames.encode_failure(1, "x" * 5000)
    assert len(failure) == frames.ANSWER_BYTES + frames.MAX_TEXT_BYTES


def test_an_object_above_the_limit_is_refused() -> None:
    head, body = split(frames.encode_request(Operation.STORE, 1, [Entry(b"large", MIB + 1)]))
    with pytest.raises(ProtocolError, match="an object of more than 1048576 bytes"):
        frames.decode_entries(frames.decode_request_header(head), body, MIB)
