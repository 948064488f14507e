"""The frames of the protocol: their layout, their limits, and their strict parsing.

All numbers are little-endian. Every header ends in a checksum of its own bytes, and every body and payload has one too.
A parser raises :class:`ProtocolError` before it allocates memory for a length that is out of bounds.

A request is a header, then a body with one entry per object. In a ``STORE`` the payloads follow, in the same order,
each with its checksum behind it. So the receiver is still busy with a payload while the sender computes. The first
:data:`LAST_BYTES` of a payload come after its other bytes, since the sender may know them only then.

The answer to ``FIND``, ``STORE`` and ``DELETE`` is one ``ANSWER`` header and a body with one entry per object. The
answer to ``LOAD`` is one ``OBJECT`` header per object, in order, each followed by its payload if the status is ``HIT``.
In place of any of these headers, ``FAILURE`` and a text end the answer.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import xxhash

MAX_ENTRIES = 1024
MAX_NAME_BYTES = 512
MAX_TEXT_BYTES = 1024
LAST_BYTES = 4096
"""The bytes at the beginning of a payload that a ``STORE`` sends last. Each payload's checksum has them last, too."""

_REQUEST_MAGIC = 0x514D4C4F
_ANSWER_MAGIC = 0x414D4C4F
_UNKNOWN_SIZE = 2**64 - 1

_REQUEST = struct.Struct("<IBxHQIQ")
_ANSWER = struct.Struct("<IBBHQQQQ")
_CHECKSUM = struct.Struct("<Q")
_ENTRY = struct.Struct("<HQ")
_FOUND = struct.Struct("<BQ")

CHECKSUM_BYTES = _CHECKSUM.size
REQUEST_BYTES = _REQUEST.size + _CHECKSUM.size
ANSWER_BYTES = _ANSWER.size + _CHECKSUM.size


class ProtocolError(ConnectionError):
    """The peer does not keep the protocol. The connection cannot be used any more."""


class Operation(enum.IntEnum):
    """The operations that a client may request."""

    FIND = 1
    LOAD = 2
    STORE = 3
    DELETE = 4


class Kind(enum.IntEnum):
    """The kinds of answer header."""

    ANSWER = 1
    OBJECT = 2
    FAILURE = 3


class Status(enum.IntEnum):
    """The outcome for one object."""

    HIT = 1
    ABSENT = 2
    DAMAGED = 3
    STORED = 4
    PRESENT = 5
    FULL = 6
    DELETED = 7
    BUSY = 8


STATUSES = {
    Operation.LOAD: frozenset({Status.HIT, Status.ABSENT, Status.DAMAGED}),
    Operation.STORE: frozenset({Status.STORED, Status.PRESENT, Status.FULL, Status.DAMAGED}),
    Operation.DELETE: frozenset({Status.DELETED, Status.BUSY}),
}
"""The statuses that an answer to each operation may hold."""


class Entry(NamedTuple):
    """One object of a request."""

    name: bytes
    nbytes: int = 0


class RequestHeader(NamedTuple):
    """The header of a request."""

    operation: Operation
    objects: int
    request_id: int
    body_bytes: int
    body_checksum: int


class AnswerHeader(NamedTuple):
    """The header of an answer, or of one object in the answer to a ``LOAD``."""

    kind: Kind
    code: int
    """The operation of an ``ANSWER``, the status of an ``OBJECT``."""
    position: int
    """The number of entries of an ``ANSWER``, the index of an ``OBJECT``."""
    request_id: int
    nbytes: int
    """The length of the bytes that follow. If an ``OBJECT`` is no hit, none follow."""
    tag: int
    """The checksum of the object's name, in an ``OBJECT`` only."""
    checksum: int
    """The checksum of the bytes that follow."""


class Found(NamedTuple):
    """The answer to a ``FIND`` for one object."""

    present: bool
    nbytes: int | None
    """``None`` if the object is absent or its size is unknown."""


def checksum(content: bytes | bytearray | memoryview) -> int:
    """Return the checksum of a header, a body or a name."""
    return xxhash.xxh3_64_intdigest(content)


def payload_checksum(payload: bytes | memoryview) -> int:
    """Return the checksum of a payload: of its bytes in the order in which a ``STORE`` sends them."""
    total = xxhash.xxh3_64()
    total.update(payload[LAST_BYTES:])  # other threads can run meanwhile, unlike in xxhash's one-shot functions
    total.update(payload[:LAST_BYTES])
    return total.intdigest()


def encode_checksum(value: int) -> bytes:
    """Return the checksum that follows the payload in a ``STORE``."""
    return _CHECKSUM.pack(value)


def decode_checksum(content: bytes) -> int:
    """Return the checksum that follows the payload in a ``STORE``."""
    return int(_CHECKSUM.unpack(content)[0])


def sealed(header: bytes) -> bytes:
    """Append the checksum of a header to it."""
    return header + _CHECKSUM.pack(checksum(header))


def unsealed(header: bytes, name: str) -> bytes:
    """Verify and remove the checksum of a header.

    Raises:
        ProtocolError: the checksum is wrong.
    """
    content = header[: -_CHECKSUM.size]
    if _CHECKSUM.unpack(header[-_CHECKSUM.size :])[0] != checksum(content):
        raise ProtocolError(f"{name} with a wrong checksum")
    return content


EnumT = TypeVar("EnumT", bound=enum.IntEnum)


def _member(kind: type[EnumT], value: int) -> EnumT:
    try:
        return kind(value)
    except ValueError as error:
        raise ProtocolError(f"unknown {kind.__name__.lower()} {value}") from error


def encode_request(operation: Operation, request_id: int, entries: Sequence[Entry]) -> bytes:
    """Return a request without its payloads.

    Raises:
        ValueError: an entry or their number is out of bounds.
    """
    if not 1 <= len(entries) <= MAX_ENTRIES:
        raise ValueError(f"{len(entries)} objects in a request; it holds 1 to {MAX_ENTRIES}")
    if any(not 1 <= len(entry.name) <= MAX_NAME_BYTES for entry in entries):
        raise ValueError(f"a name must have 1 to {MAX_NAME_BYTES} bytes")
    body = b"".join(_ENTRY.pack(len(entry.name), entry.nbytes) + entry.name for entry in entries)
    return sealed(_REQUEST.pack(_REQUEST_MAGIC, operation, len(entries), request_id, len(body), checksum(body))) + body


def decode_request_header(header: bytes) -> RequestHeader:
    """Parse the header of a request.

    Raises:
        ProtocolError: it breaks the protocol or its limits.
    """
    if len(header) != REQUEST_BYTES:
        raise ProtocolError(f"a request header of {len(header)} bytes")
    magic, operation, count, request_id, body_bytes, body_checksum = _REQUEST.unpack(unsealed(header, "a request"))
    if magic != _REQUEST_MAGIC:
        raise ProtocolError("no request")
    least, most = count * (_ENTRY.size + 1), count * (_ENTRY.size + MAX_NAME_BYTES)
    if not 1 <= count <= MAX_ENTRIES or not least <= body_bytes <= most:
        raise ProtocolError(f"a request with {count} entries in {body_bytes} bytes")
    return RequestHeader(_member(Operation, operation), count, request_id, body_bytes, body_checksum)


def decode_entries(header: RequestHeader, body: bytes, max_object_bytes: int) -> list[Entry]:
    """Parse the body of a request.

    Raises:
        ProtocolError: it breaks the protocol or its limits.
    """
    if len(body) != header.body_bytes or checksum(body) != header.body_checksum:
        raise ProtocolError("the body of a request is damaged")
    entries = list(_entries(body))
    if len(entries) != header.objects:
        raise ProtocolError(f"{len(entries)} entries in a request for {header.objects}")
    if any(entry.nbytes > max_object_bytes for entry in entries):
        raise ProtocolError(f"an object of more than {max_object_bytes} bytes")
    return entries


def _entries(body: bytes) -> Iterator[Entry]:
    offset = 0
    while offset < len(body):
        if len(body) - offset < _ENTRY.size:
            raise ProtocolError("an entry that is cut short")
        name_bytes, nbytes = _ENTRY.unpack_from(body, offset)
        offset += _ENTRY.size
        name = body[offset : offset + name_bytes]
        if not 1 <= name_bytes <= MAX_NAME_BYTES or len(name) != name_bytes:
            raise ProtocolError(f"a name of {name_bytes} bytes")
        offset += name_bytes
        yield Entry(name, nbytes)


def _encode_answer(header: AnswerHeader) -> bytes:
    return sealed(_ANSWER.pack(_ANSWER_MAGIC, *header))


def encode_answer(operation: Operation, request_id: int, count: int, body: bytes) -> bytes:
    """Return the answer to a ``FIND``, ``STORE`` or ``DELETE``."""
    return _encode_answer(AnswerHeader(Kind.ANSWER, operation, count, request_id, len(body), 0, checksum(body))) + body


def encode_failure(request_id: int, text: str) -> bytes:
    """Return the answer to a request that failed as a whole."""
    body = text.encode()[:MAX_TEXT_BYTES]
    return _encode_answer(AnswerHeader(Kind.FAILURE, 0, 0, request_id, len(body), 0, checksum(body))) + body


def encode_object(
    status: Status, index: int, request_id: int, name: bytes, nbytes: int, payload_checksum: int
) -> bytes:
    """Return the header of one object in the answer to a ``LOAD``."""
    return _encode_answer(
        AnswerHeader(Kind.OBJECT, status, index, request_id, nbytes, checksum(name), payload_checksum)
    )


def decode_answer_header(header: bytes) -> AnswerHeader:
    """Parse the header of an answer. Its fields are not yet compared with the request.

    Raises:
        ProtocolError: it breaks the protocol or its limits.
    """
    if len(header) != ANSWER_BYTES:
        raise ProtocolError(f"an answer header of {len(header)} bytes")
    magic, kind, *fields = _ANSWER.unpack(unsealed(header, "an answer"))
    if magic != _ANSWER_MAGIC:
        raise ProtocolError("no answer")
    answer = AnswerHeader(_member(Kind, kind), *fields)
    if answer.kind is Kind.FAILURE and answer.nbytes > MAX_TEXT_BYTES:
        raise ProtocolError(f"a message of {answer.nbytes} bytes")
    return answer


def encode_found(found: Sequence[Found]) -> bytes:
    """Return the body of the answer to a ``FIND``."""
    return b"".join(_FOUND.pack(one.present, _UNKNOWN_SIZE if one.nbytes is None else one.nbytes) for one in found)


def decode_found(body: bytes, count: int) -> list[Found]:
    """Parse the body of the answer to a ``FIND``.

    Raises:
        ProtocolError: it breaks the protocol.
    """
    if len(body) != count * _FOUND.size:
        raise ProtocolError(f"{len(body)} bytes for {count} objects")
    return [_found(present, nbytes) for present, nbytes in _FOUND.iter_unpack(body)]


def _found(present: int, nbytes: int) -> Found:
    if present not in (0, 1) or (not present and nbytes != _UNKNOWN_SIZE):
        raise ProtocolError(f"presence {present} with a size of {nbytes}")
    return Found(bool(present), None if nbytes == _UNKNOWN_SIZE else nbytes)


def find_body_bytes(count: int) -> int:
    """Return the length of the answer to a ``FIND`` for ``count`` objects."""
    return count * _FOUND.size


def decode_statuses(operation: Operation, body: bytes) -> list[Status]:
    """Parse the body of the answer to a ``STORE`` or ``DELETE``: one byte per object.

    Raises:
        ProtocolError: a status that the operation does not have.
    """
    return [decode_status(operation, value) for value in body]


def decode_status(operation: Operation, value: int) -> Status:
    """Return the status with a number.

    Raises:
        ProtocolError: a status that the operation does not have.
    """
    status = _member(Status, value)
    if status not in STATUSES[operation]:
        raise ProtocolError(f"status {status.name} in answer to {operation.name}")
    return status
