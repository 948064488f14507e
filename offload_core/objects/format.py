"""The stored object: its header, its checksums and its verification (format version 2; 3 if it is encrypted).

An object is one header of 4096 bytes followed by one payload. ``docs/object-format.md`` defines every byte, and the
duties of readers and writers.

:class:`offload_core.memory.payload_layout.PackLayout` describes the raw bytes of a payload. The codecs are in
:mod:`offload_core.objects.codecs`. :mod:`offload_core.objects.compression` compresses and restores whole objects, and
:mod:`offload_core.objects.encryption` encrypts and decrypts them.
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
"""Version of objects without encryption, and part of every fingerprint."""
ENCRYPTED_VERSION = 3
"""Version of encrypted objects. Their names differ from those of other objects, so no fingerprint includes it."""
HEADER_BYTES = 4096
CHECKSUM_BYTES = 16
LONGEST_KEY_ID = 16

_FIELDS = struct.Struct("<8sHBBB3x32s64s64sQQ16s16s")
_ENCRYPTION_FIELDS = struct.Struct("<BB6x16s16s32s16s")
_AES_256_GCM = 1
_STORED_CHECKSUM_OFFSET = _FIELDS.size - 2 * CHECKSUM_BYTES
_TAG_OFFSET = _FIELDS.size + _ENCRYPTION_FIELDS.size - CHECKSUM_BYTES
_HEADER_CHECKSUM_OFFSET = HEADER_BYTES - CHECKSUM_BYTES


class Codec(enum.IntEnum):
    """The form of a stored payload, as the header has it."""

    NONE = 0
    ZSTD = 1
    ZSTD_PLANES = 2


_CODECS = frozenset(Codec)


def name_suffix(key_id: str) -> str:
    """Return the end of the pack names of all objects that are encrypted with a key.

    So objects of other keys and objects without encryption have other names, and none hides another.
    """
    return f"-aes-{key_id}"


class WrongKeyError(Exception):
    """The object is encrypted with a key that the reader does not have.

    Args:
        key_id: the id of that key.
    """

    def __init__(self, key_id: str) -> None:
        super().__init__(f"the object is encrypted with another key, of the id {key_id!r}")
        self.key_id = key_id


class OtherVersionError(ObjectFormatError):
    """The object has a format version that this reader does not know. It may be sound."""


class Encryption(NamedTuple):
    """The fields that only an encrypted object's header has."""

    key_id: str
    """The operator's name of the key: 1 to 16 ASCII characters."""
    key_check: bytes
    """16 bytes derived from the key. They tell another key of the same id from a forged object."""
    salt: bytes
    """32 random bytes, from which the object's own key is derived."""
    tag: bytes
    """Authentication tag of AES-256-GCM: 16 bytes."""

    @property
    def name_suffix(self) -> str:
        """The end of the pack name that the object must have."""
        return name_suffix(self.key_id)


class Header(NamedTuple):
    """The content of an object's header."""

    key: ObjectKey
    codec: Codec
    raw_bytes: int
    stored_bytes: int
    stored_checksum: bytes
    """XXH3-128 digest of the payload in the object."""
    raw_checksum: bytes
    """XXH3-128 digest of the payload before the codec. In an encrypted object it is encrypted as well."""
    encryption: Encryption | None = None


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


def seal(view: memoryview, key: ObjectKey, payload_checksum: bytes | None = None) -> None:
    """Write the header, checksums included, in front of raw bytes that are already in place.

    Args:
        view: the whole object, writable: ``HEADER_BYTES`` bytes to overwrite, then the payload.
        key: the object's name.
        payload_checksum: the checksum of the payload in ``view``, if the caller has it already.

    Raises:
        ObjectFormatError: the key does not fit into a header.
    """
    payload = view[HEADER_BYTES:]
    digest = payload_checksum or checksum(payload)
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
    encryption = header.encryption
    _FIELDS.pack_into(
        packed,
        0,
        MAGIC,
        FORMAT_VERSION if encryption is None else ENCRYPTED_VERSION,
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
    if encryption is not None:
        key_id = encryption.key_id.encode("ascii")
        _ENCRYPTION_FIELDS.pack_into(packed, _FIELDS.size, _AES_256_GCM, len(key_id), key_id, *encryption[1:])
    packed[_HEADER_CHECKSUM_OFFSET:] = xxhash.xxh3_128_digest(packed[:_HEADER_CHECKSUM_OFFSET])
    view[:HEADER_BYTES] = packed


def authenticated_bytes(view: memoryview) -> bytes:
    """Return the header's bytes that the encryption authenticates: all but those that follow from the encryption.

    The stored checksum and the tag count as zeros, and the header's checksum is left out.
    """
    header = bytearray(view[:_HEADER_CHECKSUM_OFFSET])
    for offset in (_STORED_CHECKSUM_OFFSET, _TAG_OFFSET):
        header[offset : offset + CHECKSUM_BYTES] = bytes(CHECKSUM_BYTES)
    return bytes(header)


def read_header(view: memoryview, key: ObjectKey) -> Header:
    """Check the header of the object in ``view``, and return it. The payload is not read.

    Args:
        view: the whole object as it came from the medium.
        key: the name that the object must have.

    Raises:
        ObjectFormatError: the message names the first difference, with the actual and the expected value.
        OtherVersionError: a whole header of a version that this reader does not know.
    """
    if len(view) < HEADER_BYTES:
        raise ObjectFormatError(f"{key}: {len(view)} bytes are fewer than the {HEADER_BYTES} of the header")
    header = view[:HEADER_BYTES]
    if xxhash.xxh3_128_digest(header[:_HEADER_CHECKSUM_OFFSET]) != bytes(header[_HEADER_CHECKSUM_OFFSET:]):
        raise ObjectFormatError(f"{key}: the header's checksum does not match its bytes")
    *fields, stored_checksum, raw_checksum = _FIELDS.unpack_from(header)
    magic, version, codec, hash_length, pack_length, namespace, chunk_hash, pack, raw, stored = fields
    if magic == MAGIC and version not in (FORMAT_VERSION, ENCRYPTED_VERSION):
        writer = "an older" if version < FORMAT_VERSION else "a newer"
        raise OtherVersionError(
            f"{key}: format version {version}, of {writer} offload-core; this reader accepts version {FORMAT_VERSION} "
            f"or {ENCRYPTED_VERSION}"
        )
    if magic != MAGIC or codec not in _CODECS:
        raise ObjectFormatError(
            f"{key}: magic {magic!r}, codec {codec}; this reader accepts {MAGIC!r}, codec {min(Codec)} to {max(Codec)}"
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
    encryption = _read_encryption(header, key) if version == ENCRYPTED_VERSION else None
    return Header(key, Codec(codec), raw, stored, stored_checksum, raw_checksum, encryption)


def _read_encryption(header: memoryview, key: ObjectKey) -> Encryption:
    cipher, id_length, key_id, *others = _ENCRYPTION_FIELDS.unpack_from(header, _FIELDS.size)
    if cipher != _AES_256_GCM or not 1 <= id_length <= LONGEST_KEY_ID:
        raise ObjectFormatError(
            f"{key}: cipher {cipher}, key id of {id_length} bytes; this reader accepts cipher {_AES_256_GCM}, "
            f"key ids of 1 to {LONGEST_KEY_ID} bytes"
        )
    encryption = Encryption(key_id[:id_length].decode("ascii", "replace"), *others)
    if not key.pack.endswith(encryption.name_suffix):
        raise ObjectFormatError(f"{key}: encrypted with the key {encryption.key_id!r}, so another object's name")
    return encryption


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
        ObjectFormatError: see :func:`verify_stored`; or the object is encrypted or compressed.
    """
    header = verify_stored(view, key, payload_checksum)
    if header.encryption is not None:
        raise ObjectFormatError(f"{key}: an encrypted object, in place of one without encryption")
    if header.codec is not Codec.NONE or header.raw_checksum != header.stored_checksum:
        raise ObjectFormatError(f"{key}: codec {header.codec}, or a wrong raw checksum, in place of uncompressed bytes")
    return header
