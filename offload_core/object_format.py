"""The stored object, byte by byte (format version 1).

An object is one header of 4096 bytes followed by one payload. All integers are little endian.

======  =====  ==========================================================================
offset  bytes  field
======  =====  ==========================================================================
     0      8  magic, ``OFFLCORE`` in ASCII
     8      2  format version, 1
    10      1  codec: 0 = none (the payload is the raw bytes)
    11      1  length of the chunk hash, 1 to 64
    12      1  length of the pack name, 1 to 64
    13      3  zero
    16     32  fingerprint of the writing rank (SHA-256)
    48     64  chunk hash, zero padded
   112     64  pack name in ASCII, zero padded
   176      8  raw length: payload bytes before the codec
   184      8  stored length: payload bytes in this object
   192     16  XXH3-128 of the stored payload, canonical (big-endian) digest
   208   3872  zero
  4080     16  XXH3-128 of bytes 0 to 4079, canonical (big-endian) digest
  4096      …  payload
======  =====  ==========================================================================

A reader MUST check the magic, the version, both checksums, the fingerprint, the key and that the object is exactly
4096 + stored length bytes long; if any differs the object is a miss. A writer MUST zero the reserved bytes. The payload
starts at 4096 so that it is page-aligned on disk and in memory. Nothing is ever unpickled.

The payload of a pack is the concatenation described by :class:`offload_core.packs.PackLayout`.
"""

from __future__ import annotations

import struct

import xxhash

from offload_core.errors import ObjectFormatError
from offload_core.keys import ObjectKey

MAGIC = b"OFFLCORE"
FORMAT_VERSION = 1
HEADER_BYTES = 4096
CODEC_NONE = 0

_FIELDS = struct.Struct("<8sHBBB3x32s64s64sQQ16s")
_HEADER_CHECKSUM_OFFSET = HEADER_BYTES - 16


def object_bytes(payload_bytes: int) -> int:
    """Return the size in bytes of an object whose stored payload has ``payload_bytes`` bytes."""
    return HEADER_BYTES + payload_bytes


def seal(view: memoryview, key: ObjectKey) -> None:
    """Write the header in front of a payload that is already in place, checksums included.

    Args:
        view: writable, the whole object: ``HEADER_BYTES`` to be overwritten, then the payload.
        key: the object's name.
    """
    payload = view[HEADER_BYTES:]
    pack = key.pack.encode("ascii")
    if not 1 <= len(key.chunk_hash) <= 64 or not 1 <= len(pack) <= 64:
        raise ObjectFormatError(f"key {key} cannot be stored: chunk hash and pack name must have 1 to 64 bytes each")
    header = bytearray(HEADER_BYTES)
    _FIELDS.pack_into(
        header,
        0,
        MAGIC,
        FORMAT_VERSION,
        CODEC_NONE,
        len(key.chunk_hash),
        len(pack),
        bytes.fromhex(key.namespace),
        key.chunk_hash,
        pack,
        len(payload),
        len(payload),
        _digest(payload),
    )
    header[_HEADER_CHECKSUM_OFFSET:] = xxhash.xxh3_128_digest(header[:_HEADER_CHECKSUM_OFFSET])
    view[:HEADER_BYTES] = header


def verify(view: memoryview, key: ObjectKey) -> None:
    """Check that ``view`` holds exactly the object named ``key``, every byte of it.

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
    magic, version, codec, hash_length, pack_length, namespace, chunk_hash, pack, raw, stored, checksum = (
        _FIELDS.unpack_from(header)
    )
    if magic != MAGIC or version != FORMAT_VERSION or codec != CODEC_NONE:
        raise ObjectFormatError(
            f"{key}: magic {magic!r}, version {version}, codec {codec}; "
            f"this reader knows {MAGIC!r}, version {FORMAT_VERSION}, codec {CODEC_NONE}"
        )
    found = ObjectKey(namespace.hex(), pack[:pack_length].decode("ascii", "replace"), chunk_hash[:hash_length])
    if found != key:
        raise ObjectFormatError(f"{key}: the header names another object, {found}")
    payload = view[HEADER_BYTES:]
    if not len(payload) == raw == stored:
        raise ObjectFormatError(f"{key}: payload of {len(payload)} bytes, header says {stored} stored and {raw} raw")
    if _digest(payload) != checksum:
        raise ObjectFormatError(f"{key}: the payload's checksum does not match its {len(payload)} bytes")


def _digest(payload: memoryview) -> bytes:
    """Return the checksum of a payload. Unlike xxhash's one-shot functions this lets other threads run meanwhile."""
    state = xxhash.xxh3_128()
    state.update(payload)
    return state.digest()
