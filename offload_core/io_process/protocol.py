"""The messages between the engine's process and the I/O process, as bytes of a fixed layout.

All numbers are little-endian. A message begins with its kind (1 byte), the number of its tier (2 bytes) and the number
of its call (8 bytes). The answer to a request has the same tier and call. The bytes of objects are not in messages:
a request names pieces of the staging memory, which both processes map.

Both sides come from one installation, and compare :data:`VERSION` when they meet.
"""

from __future__ import annotations

import builtins
import enum
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeGuard, TypeVar

from offload_core.api import errors, events
from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.tiers.calls.lent_objects import WantedObject
from offload_core.tiers.object_io import LoadEnd
from offload_core.tiers.storage import StoreEnd

T = TypeVar("T")

MAX_KEYS: Final = 8192
"""Keys in one message; a message has a limited size."""
VERSION: Final = 8
"""It rises with each change of a message."""

NO_PIECE: Final = 2**64 - 1
"""The offset that stands for no piece of staging memory."""


class Kind(enum.IntEnum):
    """The kinds of messages."""

    OPEN = 1
    CLOSE = 2
    CONTAINS = 3
    LOAD = 4
    STORE = 5
    SEAL = 6
    DELETE = 7
    TOUCH = 8
    PING = 9
    EVENT = 10
    """An event for the observers; it has no answer."""
    BORROW = 11
    """Lend stored objects; see :class:`~offload_core.tiers.calls.lent_objects.Loan`."""
    RESERVE = 12
    """Lend memory for objects that will be stored."""
    GIVE_BACK = 13
    """Release the memory that a request of one of the last two kinds has lent; it has no answer."""
    DONE = 20
    """Answer to any request that worked."""
    FAILED = 21
    """Answer to a request that raised."""
    EVICTED = 22
    """The backend evicted objects; not an answer."""
    STUCK_THREADS = 23
    """The number of stuck threads has changed; not an answer."""
    EVENTS_DROPPED = 24
    """The observers are too slow, and some events were dropped; not an answer."""
    EVICTED_BY_OTHERS = 25
    """A store of another process of the engine evicted objects; not an answer."""


class Message(NamedTuple):
    """A message without the interpretation of its body."""

    kind: Kind
    tier: int
    call: int
    body: memoryview


class Piece(NamedTuple):
    """The memory of one object.

    Args:
        offset: position in the staging memory, or in the memory that the tier lends, in bytes.
        nbytes: its length, and the length of the scratch memory.
        scratch: position of the second lease, for compressed bytes, or :data:`NO_PIECE`.
        spare: for a store, whether the object may use free capacity only.
        unsealed: for a store, whether the header and the checksum are to be written first.
        lending: for a store from lent memory, the number of the request that has reserved it; else 0.
    """

    offset: int
    nbytes: int
    scratch: int = NO_PIECE
    spare: bool = False
    unsealed: bool = False
    lending: int = 0


class ProtocolError(ValueError):
    """Bytes that are no message of this version."""


_HEAD = struct.Struct("<BHQ")
_COUNT = struct.Struct("<I")
_KEY = struct.Struct("<HB")
_PIECE = struct.Struct("<QQQ??Q")
_LENDING = struct.Struct("<Q")
_WANTED = struct.Struct("<Q?")
_LENT = struct.Struct("<BQ")
_END = struct.Struct("<BQ?")
_NBYTES = struct.Struct("<Q")
_CHANGE = struct.Struct("<i")
_TEXT = struct.Struct("<H")
_ERROR = struct.Struct("<Bi")

_LOAD_OUTCOMES = tuple(LoadOutcome)
_BORROW_OUTCOMES = (None, *LoadOutcome)
_STORE_OUTCOMES = (None, *StoreOutcome)


def message(kind: Kind, tier: int = 0, call: int = 0, body: bytes = b"") -> bytes:
    """Return the bytes of a message."""
    return _HEAD.pack(kind, tier, call) + body


def parse(frame: bytes) -> Message:
    """Divide a message into its head and its body.

    Raises:
        ProtocolError: it is too short, or of an unknown kind.
    """
    try:
        kind, tier, call = _HEAD.unpack_from(frame)
        return Message(Kind(kind), tier, call, memoryview(frame)[_HEAD.size :])
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"a message of {len(frame)} bytes is damaged: {error}") from error


def pack_keys(keys: Sequence[ObjectKey]) -> bytes:
    """Return the bytes of keys. Each namespace with its pack is there once."""
    places: dict[tuple[str, str], int] = {}
    entries = []
    for key in keys:
        place = places.setdefault(key[:2], len(places))
        entries.append(_KEY.pack(place, len(key.chunk_hash)))
        entries.append(key.chunk_hash)
    table = b"".join(_text(namespace) + _text(pack) for namespace, pack in places)
    return b"".join((_COUNT.pack(len(places)), table, _COUNT.pack(len(keys)), *entries))


def pack_pieces(pieces: Iterable[Piece]) -> bytes:
    """Return the bytes of pieces, one per key of the same message."""
    return b"".join(_PIECE.pack(*piece) for piece in pieces)


def pack_flags(flags: Iterable[bool]) -> bytes:
    """Return the bytes of flags, one per key of the request."""
    return bytes(map(bool, flags))


def pack_loaded(end: LoadEnd) -> bytes:
    """Return the bytes of a load's answer."""
    outcomes = bytes(map(_LOAD_OUTCOMES.index, end.outcomes))
    return _NBYTES.pack(end.stored_bytes) + _COUNT.pack(end.read_twice) + outcomes


def pack_stored(ends: Iterable[StoreEnd]) -> bytes:
    """Return the bytes of a store's answer."""
    return b"".join(_END.pack(_STORE_OUTCOMES.index(end.outcome), end.nbytes, end.compressed) for end in ends)


def pack_lending(number: int) -> bytes:
    """Return the bytes of the number of a request that lends."""
    return _LENDING.pack(number)


def pack_wanted(wanted: Sequence[WantedObject]) -> bytes:
    """Return the bytes of objects to borrow or to reserve memory for."""
    return pack_keys([one.key for one in wanted]) + b"".join(_WANTED.pack(one.nbytes, one.spare) for one in wanted)


def pack_borrowed(outcomes: Sequence[LoadOutcome | None], offsets: Sequence[int]) -> bytes:
    """Return the bytes of the answer of a loan.

    Args:
        offsets: one per object; :data:`NO_PIECE` if it is not lent.
    """
    return b"".join(map(_LENT.pack, map(_BORROW_OUTCOMES.index, outcomes), offsets))


def pack_reserved(outcomes: Sequence[StoreOutcome | None], offsets: Sequence[int]) -> bytes:
    """Return the bytes of the answer of a reservation; see :func:`pack_borrowed`."""
    return b"".join(map(_LENT.pack, map(_STORE_OUTCOMES.index, outcomes), offsets))


def pack_change(change: int) -> bytes:
    """Return the bytes of a change of a number."""
    return _CHANGE.pack(change)


def pack_event(event: events.Event) -> bytes:
    """Return the bytes of an event."""
    fields = {
        name: [[*key[:2], key.chunk_hash.hex()] for key in value] if isinstance(value, tuple) else value
        for name, value in vars(event).items()
    }
    return json.dumps([type(event).__name__, fields]).encode()


class Reader:
    """Reads the parts of a body, in the order in which they were written.

    Its methods raise :class:`ProtocolError` where the body is too short or has an impossible value.
    """

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._position = 0

    def keys(self) -> list[ObjectKey]:
        """Read the keys that :func:`pack_keys` wrote."""
        places: list[tuple[str, str]] = [(self.text(), self.text()) for _ in range(self._count())]
        keys = []
        for _ in range(self._count()):
            place, length = self._read(_KEY)
            if place >= len(places):
                raise ProtocolError(f"a key names pack {place}; the message has {len(places)}")
            namespace, pack = places[place]
            keys.append(ObjectKey(namespace, pack, self._bytes(length)))
        return keys

    def pieces(self, count: int) -> list[Piece]:
        """Read the pieces that :func:`pack_pieces` wrote."""
        return [Piece(*self._read(_PIECE)) for _ in range(count)]

    def flags(self, count: int) -> list[bool]:
        """Read the flags that :func:`pack_flags` wrote."""
        return list(map(bool, self._bytes(count)))

    def loaded(self, count: int) -> LoadEnd:
        """Read the answer that :func:`pack_loaded` wrote."""
        (stored_bytes,) = self._read(_NBYTES)
        read_twice = self._count()
        try:
            return LoadEnd([_LOAD_OUTCOMES[index] for index in self._bytes(count)], stored_bytes, read_twice)
        except IndexError as error:
            raise ProtocolError("there is no such outcome of a load") from error

    def lending(self) -> int:
        """Read the number that :func:`pack_lending` wrote."""
        return int(self._read(_LENDING)[0])

    def wanted(self) -> list[WantedObject]:
        """Read the objects that :func:`pack_wanted` wrote."""
        return [WantedObject(key, *self._read(_WANTED)) for key in self.keys()]

    def borrowed(self, count: int) -> tuple[list[LoadOutcome | None], list[int]]:
        """Read the answer that :func:`pack_borrowed` wrote: one outcome and one offset per object."""
        return self._lent(count, _BORROW_OUTCOMES)

    def reserved(self, count: int) -> tuple[list[StoreOutcome | None], list[int]]:
        """Read the answer that :func:`pack_reserved` wrote: one outcome and one offset per object."""
        return self._lent(count, _STORE_OUTCOMES)

    def _lent(self, count: int, outcomes: Sequence[T]) -> tuple[list[T], list[int]]:
        answers = [self._read(_LENT) for _ in range(count)]
        if any(number >= len(outcomes) for number, _ in answers):
            raise ProtocolError("there is no such outcome of a loan or a reservation")
        return [outcomes[number] for number, _ in answers], [offset for _, offset in answers]

    def stored(self, count: int) -> list[StoreEnd]:
        """Read the answer that :func:`pack_stored` wrote."""
        ends = []
        for _ in range(count):
            outcome, nbytes, compressed = self._read(_END)
            if outcome >= len(_STORE_OUTCOMES):
                raise ProtocolError(f"there is no outcome {outcome} of a store")
            ends.append(StoreEnd(_STORE_OUTCOMES[outcome], nbytes, compressed))
        return ends

    def change(self) -> int:
        """Read the change that :func:`pack_change` wrote."""
        return int(self._read(_CHANGE)[0])

    def error(self) -> Exception:
        """Read the error that :func:`pack_error` wrote, as an exception with the same name, text and error number."""
        kind, number = self._read(_ERROR)
        name, text = self.text(), self.text()
        base = _ERROR_KINDS[kind] if kind < len(_ERROR_KINDS) else RuntimeError
        if base is errors.ConfigError:
            return errors.ConfigError(text.split("\0"), "backends")
        known = getattr(errors, name, None) or _OS_ERRORS.get(name)
        if not (isinstance(known, type) and issubclass(known, base)):
            known = type(name.replace("\0", "") or base.__name__, (base,), {})
        error: Exception = known(number, text) if number and issubclass(known, OSError) else known(text)
        return error

    def event(self) -> events.Event:
        """Read the event that :func:`pack_event` wrote."""
        try:
            name, fields = json.loads(bytes(self._body[self._position :]))
            if "keys" in fields:
                fields["keys"] = tuple(ObjectKey(key[0], key[1], bytes.fromhex(key[2])) for key in fields["keys"])
            event: events.Event = _EVENTS[name](**fields)
        except (ValueError, TypeError, LookupError) as error:
            raise ProtocolError(f"an event is damaged: {error}") from error
        return event

    def text(self) -> str:
        """Read a text."""
        (length,) = self._read(_TEXT)
        return self._bytes(length).decode(errors="replace")

    def _count(self) -> int:
        return int(self._read(_COUNT)[0])

    def _read(self, layout: struct.Struct) -> tuple[Any, ...]:
        try:
            parts = layout.unpack_from(self._body, self._position)
        except struct.error as error:
            raise ProtocolError(f"a message ends too early: {error}") from error
        self._position += layout.size
        return parts

    def _bytes(self, length: int) -> bytes:
        part = self._body[self._position : self._position + length]
        if len(part) < length:
            raise ProtocolError(f"a message ends too early: {length} bytes are announced, {len(part)} follow")
        self._position += length
        return bytes(part)


def parts_of(keys: Sequence[ObjectKey]) -> Iterator[Sequence[ObjectKey]]:
    """Divide keys into parts that fit into one message each."""
    return (keys[start : start + MAX_KEYS] for start in range(0, len(keys), MAX_KEYS))


def pack_error(error: BaseException) -> bytes:
    """Return the bytes of an exception: its kind, its error number, its name and its text."""
    kind = next((index for index, base in enumerate(_ERROR_KINDS) if isinstance(error, base)), len(_ERROR_KINDS))
    number = error.errno or 0 if isinstance(error, OSError) else 0
    text = errors.text_of(error)
    if isinstance(error, errors.ConfigError):
        text = "\0".join(error.problems)
    elif number and isinstance(error, OSError) and text == f"[Errno {number}] {error.strerror}":
        text = str(error.strerror)
    else:
        number = 0  # the text says it all, with the name of a file
    return _ERROR.pack(kind, number) + _text(type(error).__name__) + _text(text)


def _is_os_error(value: object) -> TypeGuard[type[OSError]]:
    return isinstance(value, type) and issubclass(value, OSError)


_ERROR_KINDS: Final[tuple[type[Exception], ...]] = (errors.ConfigError, errors.PluginError, OSError)
_OS_ERRORS: Final = {kind.__name__: kind for kind in vars(builtins).values() if _is_os_error(kind)}
_EVENTS: Final = {kind.__name__: kind for kind in events.Event.__subclasses__()}
_MAX_TEXT_BYTES: Final = 4000


def _text(text: str) -> bytes:
    data = text.encode(errors="replace")[:_MAX_TEXT_BYTES]
    return _TEXT.pack(len(data)) + data
