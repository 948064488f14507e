"""Whole objects: from the sealed form to the compressed form and back.

The restored object equals the sealed object byte for byte, so it may be stored again on any tier.
"""

from __future__ import annotations

import xxhash

from offload_core.api.errors import ObjectFormatError
from offload_core.api.keys import ObjectKey
from offload_core.objects import codecs
from offload_core.objects.format import HEADER_BYTES, Codec, Header, checksum, verify_stored, write_header

SMALLEST_GAIN = 0.05
"""The part of an object's size that compression must save, or the object is stored uncompressed.

A load of a compressed object costs one pass of decoding, at 1 to 2 GB/s, and a second staging buffer. The saved
capacity or bandwidth must be worth that.
"""


def largest_compressed_bytes(object_bytes: int) -> int:
    """Return the limit in bytes for the compressed form of an object of ``object_bytes``, header included."""
    return HEADER_BYTES + int((object_bytes - HEADER_BYTES) * (1 - SMALLEST_GAIN))


def compress(header: Header, source: memoryview, target: memoryview, codec: Codec, level: int) -> int | None:
    """Write the compressed form of a sealed object.

    Args:
        header: the header of the object in ``source``.
        source: the whole object, sealed or verified; it is only read.
        target: writable, of at most :func:`largest_compressed_bytes` bytes. Its content beyond the result is undefined.
        codec: any but ``NONE``.
        level: compression level of zstd, 1 to 19.

    Returns:
        The size of the object in ``target`` in bytes. ``None`` if it does not fit: compression saves too little.
    """
    used = codecs.encode(codec, level, source[HEADER_BYTES:], target[HEADER_BYTES:])
    if used is None or used >= header.raw_bytes:
        return None
    payload = target[HEADER_BYTES : HEADER_BYTES + used]
    write_header(target, header._replace(codec=codec, stored_bytes=used, stored_checksum=checksum(payload)))
    return HEADER_BYTES + used


def restore(stored: memoryview, target: memoryview, key: ObjectKey) -> Header:
    """Verify a compressed object and write its sealed form into ``target``.

    Args:
        stored: the whole object as it came from the medium.
        target: writable, of exactly the size of the sealed object.
        key: the name that the object must have.

    Raises:
        ObjectFormatError: ``stored`` is another object, has another size, or does not decode to the original bytes.
    """
    header = verify_stored(stored, key)
    raw_bytes = len(target) - HEADER_BYTES
    if header.raw_bytes != raw_bytes or header.codec is Codec.NONE or header.encryption is not None:
        raise ObjectFormatError(
            f"{key}: the header says {header.raw_bytes} raw bytes (codec {header.codec}"
            f"{'' if header.encryption is None else ', encrypted'}), but a compressed object of {raw_bytes} raw bytes "
            "is expected"
        )
    return restore_verified(header, stored, target)


def restore_verified(header: Header, stored: memoryview, target: memoryview) -> Header:
    """Decode a payload whose stored bytes are verified, and write the sealed object into ``target``.

    Args:
        header: the object's header, with the key for the sealed object.
        stored: the whole object. Its header is not read. Without a codec its payload may be in ``target`` already.
        target: writable, of exactly the size of the sealed object.

    Raises:
        ObjectFormatError: ``stored`` does not decode to the original bytes.
    """
    key, raw_bytes = header.key, len(target) - HEADER_BYTES
    payload = target[HEADER_BYTES:]
    try:
        if header.codec is not Codec.NONE:
            codecs.decode(header.codec, stored[HEADER_BYTES:], payload)
    except ObjectFormatError as error:
        raise ObjectFormatError(f"{key}: codec {header.codec}: {error}") from error
    if checksum(payload) != header.raw_checksum:
        raise ObjectFormatError(f"{key}: codec {header.codec}: the raw checksum does not match the decoded bytes")
    header = header._replace(codec=Codec.NONE, stored_bytes=raw_bytes, stored_checksum=header.raw_checksum)
    write_header(target, header)
    return header


def verify_any(stored: memoryview, key: ObjectKey) -> Header:
    """Check every byte of an object of any codec, decoded bytes included, with memory for a few blocks.

    The payload of an encrypted object is not decoded: only its stored bytes are checked.

    Raises:
        ObjectFormatError: the message names the first difference.
    """
    header = verify_stored(stored, key)
    if header.encryption is not None:
        return header
    if header.codec is Codec.NONE:
        if header.raw_checksum != header.stored_checksum:
            raise ObjectFormatError(f"{key}: codec 0, but the raw checksum differs from the stored checksum")
        return header
    check_decoded(header, stored)
    return header


def check_decoded(header: Header, stored: memoryview) -> None:
    """Check the raw checksum of a payload, with memory for a few blocks.

    Args:
        stored: the whole object. Its header is not read.

    Raises:
        ObjectFormatError: the payload does not decode to the bytes of the raw checksum.
    """
    key, payload = header.key, stored[HEADER_BYTES:]
    digest = xxhash.xxh3_128()
    try:
        for block in (
            [payload] if header.codec is Codec.NONE else codecs.decoded_blocks(header.codec, payload, header.raw_bytes)
        ):
            digest.update(block)
    except ObjectFormatError as error:
        raise ObjectFormatError(f"{key}: codec {header.codec}: {error}") from error
    if digest.digest() != header.raw_checksum:
        raise ObjectFormatError(f"{key}: codec {header.codec}: the raw checksum does not match the decoded bytes")
