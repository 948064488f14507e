"""The stored object, byte by byte (format version 2).

An object is one header of 4096 bytes followed by one payload. All integers are little endian.

======  =====  ==========================================================================
offset  bytes  field
======  =====  ==========================================================================
     0      8  magic, ``OFFLCORE`` in ASCII
     8      2  format version, 2
    10      1  codec: how the raw bytes are stored, 0 to 2 (below)
    11      1  length of the chunk hash, 1 to 64
    12      1  length of the pack name, 1 to 64
    13      3  zero
    16     32  fingerprint of the writing rank (SHA-256)
    48     64  chunk hash, zero padded
   112     64  pack name in ASCII, zero padded
   176      8  raw length: payload bytes before the codec
   184      8  stored length: payload bytes in this object
   192     16  XXH3-128 of the stored payload, canonical (big-endian) digest
   208     16  XXH3-128 of the raw bytes, canonical (big-endian) digest
   224   3856  zero
  4080     16  XXH3-128 of bytes 0 to 4079, canonical (big-endian) digest
  4096      …  payload
======  =====  ==========================================================================

=====  =============  ===================================================================
codec  name           payload
=====  =============  ===================================================================
    0  none           the raw bytes
    1  zstd           one zstd frame of the raw bytes
    2  zstd-planes    the bytes at even offsets as they are, then one or more zstd frames
                      of the bytes at odd offsets (the high bytes of 16-bit values)
=====  =============  ===================================================================

A reader MUST check the magic, the version, the header's and the stored payload's checksums, the fingerprint, the key
and that the object is exactly 4096 + stored length bytes long, before it decodes anything; then that decoding gives
exactly the raw length and the raw checksum. If any differs, or the raw length is not the one that the pack has, the
object is a miss. A writer MUST zero the reserved bytes and use another codec than 0 only where that makes the payload
shorter. The payload starts at 4096 so that it is page-aligned on disk and in memory. Nothing is ever unpickled.

The raw bytes of a pack are the concatenation described by :class:`offload_core.memory.payload_layout.PackLayout`;
:mod:`offload_core.objects.codecs` has the codecs, :mod:`offload_core.objects.compression` puts both together.
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
    """How a payload is stored."""

    NONE = 0
    ZSTD = 1
    ZSTD_PLANES = 2


class Header(NamedTuple):
    """What the header of an object says, checked against its bytes."""

    key: ObjectKey
    codec: Codec
    raw_bytes: int
    stored_bytes: int
    stored_checksum: bytes
    raw_checksum: bytes


def object_bytes(payload_bytes: int) -> int:
    """Return the size in bytes of an object whose stored payload has ``payload_bytes`` bytes."""
    return HEADER_BYTES + payload_bytes


def checksum(data: memoryview) -> bytes:
    """Return the XXH3-128 digest of ``data``, 16 bytes, as headers have it.

    Unlike xxhash's one-shot functions this lets other threads run meanwhile.
    """
    state = xxhash.xxh3_128()
    state.update(data)
    return state.digest()


def seal(view: memoryview, key: ObjectKey) -> None:
    """Write the header in front of raw bytes that are already in place, checksums included.

    Args:
        view: writable, the whole object: ``HEADER_BYTES`` to be overwritten, then the payload.
        key: the object's name.

    Raises:
        ObjectFormatError: the key does not fit.
    """
    payload = view[HEADER_BYTES:]
    digest = checksum(payload)
    write_header(view, Header(key, Codec.NONE, len(payload), len(payload), digest, digest))


def write_header(view: memoryview, header: Header) -> None:
    """Overwrite the first ``HEADER_BYTES`` bytes of ``view`` with ``header`` and its checksum.

    Raises:
        ObjectFormatError: the key does not fit.
    """
    key = header.key
    pack = key.pack.encode("ascii")
    if not 1 <= len(key.chunk_hash) <= 64 or not 1 <= len(pack) <= 64:
        raise ObjectFormatError(f"key {key} cannot be stored: chunk hash and pack name must have 1 to 64 bytes each")
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
    """Return the header of the object in ``view``, which is to be named ``key``; the payload is not looked at.

    Args:
        view: the whole object as it came from the medium.
        key: the name it was asked for under.

    Raises:
        ObjectFormatError: naming the first thing that differs, what was found and what was expected.
    """
    if len(view) < HEADER_BYTES:
        raise ObjectFormatError(f"{key}: {len(view)} bytes is shorter than the {HEADER_BYTES}-byte header")
    header = view[:HEADER_BYTES]
    if xxhash.xxh3_128_digest(header[:_HEADER_CHECKSUM_OFFSET]) != bytes(header[_HEADER_CHECKSUM_OFFSET:]):
        raise ObjectFormatError(f"{key}: the header's checksum does not match its bytes")
    magic, version, codec, hash_length, pack_length, namespace, chunk_hash, pack, raw, stored, *checksums = (
        _FIELDS.unpack_from(header)
    )
    if magic != MAGIC or version != FORMAT_VERSION or codec not in list(Codec):
        raise ObjectFormatError(
            f"{key}: magic {magic!r}, version {version}, codec {codec}; "
            f"this reader knows {MAGIC!r}, version {FORMAT_VERSION}, codec {min(Codec)} to {max(Codec)}"
        )
    found = ObjectKey(namespace.hex(), pack[:pack_length].decode("ascii", "replace"), chunk_hash[:hash_length])
    if found != key:
        raise ObjectFormatError(f"{key}: the header names another object, {found}")
    payload_bytes = len(view) - HEADER_BYTES
    if payload_bytes != stored or (stored != raw if codec == Codec.NONE else stored >= raw):
        raise ObjectFormatError(
            f"{key}: payload of {payload_bytes} bytes, header says {stored} stored and {raw} raw"
            + (f" (codec {codec})" if codec else "")
        )
    return Header(key, Codec(codec), raw, stored, *checksums)


def verify_stored(view: memoryview, key: ObjectKey) -> Header:
    """Check every byte of an object as it is stored, of any codec; what it decodes to is not looked at.

    Raises:
        ObjectFormatError: as :func:`read_header`, and where the payload's checksum does not match.
    """
    header = read_header(view, key)
    if checksum(view[HEADER_BYTES:]) != header.stored_checksum:
        raise ObjectFormatError(f"{key}: the payload's checksum does not match its {header.stored_bytes} bytes")
    return header


def verify(view: memoryview, key: ObjectKey) -> Header:
    """Check that ``view`` holds exactly the object named ``key`` with its raw bytes, every byte of it.

    Raises:
        ObjectFormatError: as :func:`verify_stored`, and where the object is compressed.
    """
    header = verify_stored(view, key)
    if header.codec is not Codec.NONE or header.raw_checksum != header.stored_checksum:
        raise ObjectFormatError(f"{key}: codec {header.codec}, or another raw checksum, where raw bytes are expected")
    return header
