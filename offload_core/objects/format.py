"""The stored object: its header, its checksums and its verification (format version 2).

An object is one header of 4096 bytes followed by one payload. ``docs/object-format.md`` defines every byte, and the
duties of readers and writers.

:class:`offload_core.memory.payload_layout.PackLayout` describes the raw bytes of a payload. The codecs are in
:mod:`offload_core.objects.codecs`, and :mod:`offload_core.objects.compression` compresses and restores whole objects.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

import xxhash

from offload_core.api.errors import ObjectFormatError
from offload_core.api.keys import ObjectKey

MAGIC = b"OFFLCORE"
FORMAT_VERSION = 2
HEADER_BYTES = 4096

_FIELDS = struct.Struct("<8sHBBB3x32s64s64sQQ16s16s")
_HEADER_CHECKSUM_OFFSET = HEADER_BYTES - 16


class Codec(enum.IntEnum):
    """The form of a stored payload, as the header has it."""

    NONE = 0
    ZSTD = 1
    ZSTD_PLANES = 2


_CODECS = frozenset(Codec)


class Header(NamedTuple):
    """The content of an object's header."""

    key: ObjectKey
    codec: Codec
    raw_bytes: int
    stored_bytes: int
    stored_checksum: bytes
    """XXH3-128 digest of the payload in the object."""
    raw_checksum: bytes
    """XXH3-128 digest of the payload before the codec."""


def object_bytes(payload_bytes: int) -> int:
    """Return the size in bytes of an object whose stored payload has ``payload_bytes`` bytes."""
    return HEADER_BYTES + payload_bytes


def checksum(data: memoryview) -> bytes:
    """Return the XXH3-128 digest of ``data``: 16 bytes in canonical form, as in a header.

    Other threads can run meanwhile, unlike in xxhash's one-shot functions.
    """
    state = xxhash.xxh3_128()
    state.update(data)
    return state.digest()


def seal(view: memoryview, key: ObjectKey) -> None:
    """Write the header, checksums included, in front of raw bytes that are already in place.

    Args:
        view: the whole object, writable: ``HEADER_BYTES`` bytes to overwrite, then the payload.
        key: the object's name.

    Raises:
        ObjectFormatError: the key does not fit into a header.
    """
    payload = view[HEADER_BYTES:]
    digest = checksum(payload)
    write_header(view, Header(key, Codec.NONE, len(payload), len(payload), digest, digest))


def write_header(view: memoryview, header: Header) -> None:
    """Overwrite the first ``HEADER_BYTES`` bytes of ``view`` with ``header`` and its checksum.

    Raises:
        ObjectFormatError: the key does not fit into a header.
    """
    key = header.key
    pack = key.pack.encode("ascii")
    if not 1 <= len(key.chunk_hash) <= 64 or not 1 <= len(pack) <= 64:
        raise ObjectFormatError(
            f"key {key} cannot be stored: its chunk hash has {len(key.chunk_hash)} bytes and its pack name "
            f"{len(pack)}; both must have 1 to 64"
        )
    packed = bytearray(HEADER_BYTES)
    _FIELDS.pack_into(
        packed,
        0,
        MAGIC,
        FORMAT_VERSION,
        header.codec,
        len(key.chunk_hash),
        len(pack),
        bytes.fromhex(key.namespace),
        key.chunk_hash,
        pack,
        header.raw_bytes,
        header.stored_bytes,
        header.stored_checksum,
        header.raw_checksum,
    )
    packed[_HEADER_CHECKSUM_OFFSET:] = xxhash.xxh3_128_digest(packed[:_HEADER_CHECKSUM_OFFSET])
    view[:HEADER_BYTES] = packed


def read_header(view: memoryview, key: ObjectKey) -> Header:
    """Check the header of the object in ``view``, and return it. The payload is not read.

    Args:
        view: the whole object as it came from the medium.
        key: the name that the object must have.

    Raises:
        ObjectFormatError: the message names the first difference, with the actual and the expected value.
    """
    if len(view) < HEADER_BYTES:
        raise ObjectFormatError(f"{key}: {len(view)} bytes are fewer than the {HEADER_BYTES} of the header")
    header = view[:HEADER_BYTES]
    if xxhash.xxh3_128_digest(header[:_HEADER_CHECKSUM_OFFSET]) != bytes(header[_HEADER_CHECKSUM_OFFSET:]):
        raise ObjectFormatError(f"{key}: the header's checksum does not match its bytes")
    magic, version, codec, hash_length, pack_length, namespace, chunk_hash, pack, raw, stored, *checksums = (
        _FIELDS.unpack_from(header)
    )
    if magic != MAGIC or version != FORMAT_VERSION or codec not in _CODECS:
        raise ObjectFormatError(
            f"{key}: magic {magic!r}, version {version}, codec {codec}; "
            f"this reader accepts {MAGIC!r}, version {FORMAT_VERSION}, codec {min(Codec)} to {max(Codec)}"
        )
    found = ObjectKey(namespace.hex(), pack[:pack_length].decode("ascii", "replace"), chunk_hash[:hash_length])
    if found != key:
        raise ObjectFormatError(f"{key}: the header names another object, {found}")
    payload_bytes = len(view) - HEADER_BYTES
    if payload_bytes != stored or (stored != raw if codec == Codec.NONE else stored >= raw):
        raise ObjectFormatError(
            f"{key}: payload of {payload_bytes} bytes, but the header says {stored} stored and {raw} raw"
            + (f" (codec {codec})" if codec else "")
        )
    return Header(key, Codec(codec), raw, stored, *checksums)


def verify_stored(view: memoryview, key: ObjectKey, payload_checksum: bytes | None = None) -> Header:
    """Check every byte of a stored object of any codec, without decoding it.

    Args:
        payload_checksum: the checksum of the payload in ``view``, if the caller has it already.

    Raises:
        ObjectFormatError: see :func:`read_header`; or the payload's checksum does not match.
    """
    header = read_header(view, key)
    if (payload_checksum or checksum(view[HEADER_BYTES:])) != header.stored_checksum:
        raise ObjectFormatError(f"{key}: the payload's checksum does not match its {header.stored_bytes} bytes")
    return header


def verify(view: memoryview, key: ObjectKey, payload_checksum: bytes | None = None) -> Header:
    """Check every byte of an uncompressed object.

    Args:
        payload_checksum: see :func:`verify_stored`.

    Raises:
        ObjectFormatError: see :func:`verify_stored`; or the object is compressed.
    """
    header = verify_stored(view, key, payload_checksum)
    if header.codec is not Codec.NONE or header.raw_checksum != header.stored_checksum:
        raise ObjectFormatError(f"{key}: codec {header.codec}, or a wrong raw checksum, in place of uncompressed bytes")
    return header
