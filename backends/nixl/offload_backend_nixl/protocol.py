"""The messages between the engine's process and the child, as packets of a socket pair.

Each message is one packet: a kind, the number of its request, and fields. Integers are little-endian. Every length is
checked before it is used, and a packet with anything missing or left over is refused.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

KindT = TypeVar("KindT", bound=enum.IntEnum)

MAX_PACKET_BYTES = 96 * 1024
MAX_NAMES = 128
MAX_NAME_BYTES = 600
MAX_TEXT_BYTES = 2000
MAX_ENTRIES = 128
MAX_MEMORIES = 16
RING = 0
"""The number of the memory that is shared from the start."""
ABSENT = -1
"""The size of an object that does not exist."""
NO_HASH = -1
"""The first byte to hash of an object of which no digest is wanted."""
DIGEST_BYTES = 16

_HEAD = struct.Struct("<BQ")
_ITEM = struct.Struct("<QQHQq")
_RESULT = struct.Struct("<BB")
_COUNT = struct.Struct("<H")
_SIZE = struct.Struct("<q")
_ENTRY = struct.Struct("<Qd")
_FAILURE = struct.Struct("<I")
_FLAG = struct.Struct("<B")


class ProtocolError(ValueError):
    """A packet that breaks the protocol."""


class Operation(enum.IntEnum):
    """The kind of a request."""

    CONFIGURE = 1
    LOAD = 2
    STORE = 3
    SIZES = 4
    DELETE = 5
    LIST = 6
    MAP = 7


class Outcome(enum.IntEnum):
    """The kind of an answer, or the end of one transfer."""

    DONE = 64
    MISS = 65
    CORRUPT = 66
    FAILED = 67
    SIZES = 68
    ENTRIES = 69
    MOVED = 70
    ENDING = 71
    REJECTED = 72


LOAD_ENDS = (Outcome.DONE, Outcome.MISS, Outcome.CORRUPT)
STORE_ENDS = (Outcome.DONE, Outcome.REJECTED)


class Entry(NamedTuple):
    """One object of a listing."""

    name: str
    nbytes: int
    stored_at_seconds: float


class Item(NamedTuple):
    """One object of a load or a store."""

    name: str
    offset: int
    """First byte of the object in the ring."""
    nbytes: int
    memory: int = RING
    """The memory that has the content of the object. All but :data:`RING` were mapped before, under this number."""
    start: int = 0
    """First byte of the content in that memory, if it is not the ring. Then the ring has only head and tail."""
    hash_start: int = NO_HASH
    """The content from this byte on is hashed after a load, if it is in other memory than the ring."""


class Result(NamedTuple):
    """The end of one transfer."""

    outcome: Outcome
    """``DONE``, or ``MISS`` or ``CORRUPT`` for a load, or ``REJECTED`` for a store."""
    digest: bytes = b""
    """The XXH3-128 digest of a loaded content, if it was wanted."""


class Request(NamedTuple):
    """A request to the child. The fields that its operation does not need keep their defaults."""

    operation: Operation
    number: int
    items: tuple[Item, ...] = ()
    """The objects of a load or a store."""
    names: tuple[str, ...] = ()
    """The objects of a question. For a listing, the name after which it goes on; none for the beginning."""
    memory: int = RING
    """The number under which a memory is mapped."""
    text: str = ""
    """The configuration, as JSON."""


class Answer(NamedTuple):
    """An answer of the child. The fields that its outcome does not need keep their defaults.

    ``ENDING`` comes before an answer: the child takes no more requests, answers those that it has, and ends. Until then
    it may write to the memory of this request.
    """

    outcome: Outcome
    number: int
    results: tuple[Result, ...] = ()
    """The end of each transfer of a request, in its order."""
    sizes: tuple[int, ...] = ()
    """The bytes of each object that was asked for, or :data:`ABSENT`."""
    entries: tuple[Entry, ...] = ()
    more: bool = False
    """``True`` if the listing goes on after the last entry."""
    code: int = 0
    """The ``errno`` of a failure."""
    text: str = ""
    """The reason of a failure, or of the child's end."""


def encode_request(request: Request) -> bytes:
    """Return the packet of a request.

    Raises:
        ProtocolError: a field is too long.
    """
    head = _HEAD.pack(request.operation, request.number)
    if request.operation is Operation.CONFIGURE:
        return _checked(head + request.text.encode())
    if request.operation is Operation.MAP:
        return _checked(head + _COUNT.pack(request.memory))
    if request.operation in (Operation.LOAD, Operation.STORE):
        items = b"".join(_ITEM.pack(*item[1:]) + _pack_name(item.name) for item in request.items)
        return _checked(head + _COUNT.pack(len(request.items)) + items)
    names = b"".join(map(_pack_name, request.names))
    return _checked(head + _COUNT.pack(len(request.names)) + names)


def decode_request(packet: bytes) -> Request:
    """Return the request in a packet.

    Raises:
        ProtocolError: the packet breaks the protocol.
    """
    reader = _Reader(packet)
    kind, number = reader.unpack(_HEAD)
    operation = _member(Operation, kind)
    if operation is Operation.CONFIGURE:
        return Request(operation, number, text=reader.rest())
    if operation is Operation.MAP:
        (memory,) = reader.unpack(_COUNT)
        reader.end()
        return Request(operation, number, memory=_at_most(memory, MAX_MEMORIES))
    (count,) = reader.unpack(_COUNT)
    _at_most(count, MAX_NAMES)
    if operation in (Operation.LOAD, Operation.STORE):
        items = tuple(_read_item(reader) for _ in range(count))
        reader.end()
        if not items:
            raise ProtocolError(f"{operation.name} of no objects")
        return Request(operation, number, items=items)
    names = tuple(reader.text(MAX_NAME_BYTES) for _ in range(count))
    reader.end()
    if operation is Operation.LIST and count > 1:
        raise ProtocolError(f"{operation.name} with {count} names")
    return Request(operation, number, names=names)


def encode_answer(answer: Answer) -> bytes:
    """Return the packet of an answer. A reason that is too long is cut.

    Raises:
        ProtocolError: a field is too long.
    """
    packet = _HEAD.pack(answer.outcome, answer.number)
    if answer.outcome is Outcome.FAILED:
        packet += _FAILURE.pack(answer.code) + answer.text.encode(errors="replace")[:MAX_TEXT_BYTES]
    elif answer.outcome is Outcome.ENDING:
        packet += answer.text.encode(errors="replace")[:MAX_TEXT_BYTES]
    elif answer.outcome is Outcome.MOVED:
        packet += _COUNT.pack(len(answer.results))
        packet += b"".join(_RESULT.pack(one.outcome, len(one.digest)) + one.digest for one in answer.results)
    elif answer.outcome is Outcome.SIZES:
        packet += _COUNT.pack(len(answer.sizes)) + b"".join(map(_SIZE.pack, answer.sizes))
    elif answer.outcome is Outcome.ENTRIES:
        packet += _FLAG.pack(answer.more) + _COUNT.pack(len(answer.entries))
        for entry in answer.entries:
            packet += _ENTRY.pack(entry.nbytes, entry.stored_at_seconds) + _pack_name(entry.name)
    return _checked(packet)


def decode_answer(packet: bytes) -> Answer:
    """Return the answer in a packet.

    Raises:
        ProtocolError: the packet breaks the protocol.
    """
    reader = _Reader(packet)
    kind, number = reader.unpack(_HEAD)
    outcome = _member(Outcome, kind)
    if outcome is Outcome.FAILED:
        (code,) = reader.unpack(_FAILURE)
        return Answer(outcome, number, code=code, text=reader.rest(MAX_TEXT_BYTES, errors="replace"))
    if outcome is Outcome.ENDING:
        return Answer(outcome, number, text=reader.rest(MAX_TEXT_BYTES, errors="replace"))
    if outcome is Outcome.MOVED:
        (count,) = reader.unpack(_COUNT)
        answer = Answer(outcome, number, results=tuple(_read_result(reader) for _ in range(_at_most(count, MAX_NAMES))))
    elif outcome is Outcome.SIZES:
        (count,) = reader.unpack(_COUNT)
        sizes = tuple(reader.unpack(_SIZE)[0] for _ in range(_at_most(count, MAX_NAMES)))
        if min(sizes, default=0) < ABSENT:
            raise ProtocolError(f"a size of {min(sizes)} bytes")
        answer = Answer(outcome, number, sizes=sizes)
    elif outcome is Outcome.ENTRIES:
        (more,) = reader.unpack(_FLAG)
        (count,) = reader.unpack(_COUNT)
        entries = tuple(_read_entry(reader) for _ in range(_at_most(count, MAX_ENTRIES)))
        if more > 1 or (more and not entries):
            raise ProtocolError(f"a listing with {count} entries goes on ({more})")
        answer = Answer(outcome, number, entries=entries, more=bool(more))
    elif outcome is Outcome.DONE:
        answer = Answer(outcome, number)
    else:
        raise ProtocolError(f"an answer of the kind {outcome.name}, which is the end of one transfer")
    reader.end()
    return answer


class _Reader:
    """The unread part of a packet."""

    def __init__(self, packet: bytes) -> None:
        if len(packet) > MAX_PACKET_BYTES:
            raise ProtocolError(f"a packet of {len(packet)} bytes; at most {MAX_PACKET_BYTES}")
        self._packet = packet
        self._position = 0

    def unpack(self, fields: struct.Struct) -> tuple[Any, ...]:
        end = self._position + fields.size
        if end > len(self._packet):
            raise ProtocolError(f"a packet of {len(self._packet)} bytes ends in a field")
        values = fields.unpack_from(self._packet, self._position)
        self._position = end
        return values

    def text(self, limit: int) -> str:
        (length,) = self.unpack(_COUNT)
        return _decode(self.take(_at_most(length, limit)))

    def take(self, count: int) -> bytes:
        end = self._position + count
        if end > len(self._packet):
            raise ProtocolError(f"a packet of {len(self._packet)} bytes ends in a field of {count}")
        found = self._packet[self._position : end]
        self._position = end
        return found

    def rest(self, limit: int = MAX_PACKET_BYTES, errors: str = "strict") -> str:
        found = self._packet[self._position :]
        _at_most(len(found), limit)
        self._position = len(self._packet)
        return _decode(found, errors)

    def end(self) -> None:
        if self._position != len(self._packet):
            raise ProtocolError(f"{len(self._packet) - self._position} bytes after the end of a packet")


def _read_item(reader: _Reader) -> Item:
    offset, nbytes, memory, start, hash_start = reader.unpack(_ITEM)
    name = reader.text(MAX_NAME_BYTES)
    if hash_start < NO_HASH or (hash_start != NO_HASH and (memory == RING or hash_start > nbytes)):
        raise ProtocolError(f"a digest from byte {hash_start} on, of an object of {nbytes} bytes in memory {memory}")
    return Item(name, offset, nbytes, memory, start, hash_start)


def _read_result(reader: _Reader) -> Result:
    kind, digest_bytes = reader.unpack(_RESULT)
    outcome = _member(Outcome, kind)
    if outcome not in (*LOAD_ENDS, *STORE_ENDS) or digest_bytes not in (0, DIGEST_BYTES):
        raise ProtocolError(f"a transfer ended with {outcome.name} and a digest of {digest_bytes} bytes")
    return Result(outcome, reader.take(digest_bytes))


def _read_entry(reader: _Reader) -> Entry:
    nbytes, stored_at_seconds = reader.unpack(_ENTRY)
    return Entry(reader.text(MAX_NAME_BYTES), nbytes, stored_at_seconds)


def _decode(data: bytes, errors: str = "strict") -> str:
    try:
        return data.decode(errors=errors)
    except UnicodeDecodeError as error:
        raise ProtocolError(f"a text that is not UTF-8: {error}") from error


def _member(members: type[KindT], number: int) -> KindT:
    try:
        return members(number)
    except ValueError as error:
        raise ProtocolError(f"a packet of the unknown kind {number}") from error


def _at_most(number: int, limit: int) -> int:
    if number > limit:
        raise ProtocolError(f"a length of {number}; at most {limit}")
    return number


def _pack_name(name: str) -> bytes:
    data = name.encode()
    _at_most(len(data), MAX_NAME_BYTES)
    return _COUNT.pack(len(data)) + data


def _checked(packet: bytes) -> bytes:
    _at_most(len(packet), MAX_PACKET_BYTES)
    return packet


def can_carry(name: str) -> bool:
    """Return whether a message can have this name. Media may have foreign names of any length and encoding."""
    try:
        return len(name.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:
        return False


def batches(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the names in groups that fit into one request each."""
    return [tuple(names[start : start + MAX_NAMES]) for start in range(0, len(names), MAX_NAMES)]
