"""The form of an object in LMCache: a header of 64 bytes with its identity, then the payload.

LMCache hands the form from its L1 to any L2 and back. The header tells an object that came back with another size, or
under another name.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

_MAGIC = b"OCLMOBJ2"
_SIZE_MAGIC = b"OCLMSIZ1"
_HEADER = struct.Struct("<8sQQ32s8x")

HEADER_BYTES = _HEADER.size


class Header(NamedTuple):
    """The header of a stored object."""

    nbytes: int
    checksum: int


def digest(name: bytes) -> bytes:
    """Return the digest of an object's name, which LMCache takes for the hash of a chunk."""
    return hashlib.blake2b(name, digest_size=32).digest()


def write_header(form: memoryview, name_digest: bytes, header: Header) -> None:
    """Write the header of an object at the start of its memory."""
    _HEADER.pack_into(form, 0, _MAGIC, header.nbytes, header.checksum, name_digest)


def read_header(form: memoryview, name_digest: bytes) -> Header | None:
    """Return the header of an object, or ``None`` if the memory does not hold that object in its whole length."""
    if len(form) < HEADER_BYTES:
        return None
    magic, nbytes, checksum, found_digest = _HEADER.unpack_from(form)
    if magic != _MAGIC or found_digest != name_digest or len(form) != HEADER_BYTES + nbytes:
        return None
    return Header(nbytes, checksum)


def write_size_record(form: memoryview, name_digest: bytes, nbytes: int) -> None:
    """Write the record of an object's size. It is a header without a payload."""
    _HEADER.pack_into(form, 0, _SIZE_MAGIC, nbytes, 0, name_digest)


def read_size_record(form: memoryview, name_digest: bytes) -> int | None:
    """Return the size in a record, or ``None`` if the memory does not hold the record of that object."""
    if len(form) != HEADER_BYTES:
        return None
    magic, nbytes, _, found_digest = _HEADER.unpack_from(form)
    return int(nbytes) if (magic, found_digest) == (_SIZE_MAGIC, name_digest) else None
