"""A sealed object in its compressed form, and back: the header of one goes with the payload of the other.

Restoring gives the sealed object of before, byte for byte: whoever has it may store it again on any tier.
"""

from __future__ import annotations

import xxhash

from offload_core.api.errors import ObjectFormatError
from offload_core.api.keys import ObjectKey
from offload_core.objects import codecs
from offload_core.objects.format import HEADER_BYTES, Codec, Header, checksum, verify_stored, write_header

SMALLEST_GAIN = 0.05
"""An object that does not get smaller by this part is stored as it is: loading a compressed one costs a pass of
decoding, at 1 to 2 GB/s, and staging memory a second time, which room or bandwidth must be worth."""


def largest_compressed_bytes(object_bytes: int) -> int:
    """Return how large the compressed form of an object of ``object_bytes`` may be, header included."""
    return HEADER_BYTES + int((object_bytes - HEADER_BYTES) * (1 - SMALLEST_GAIN))


def compress(header: Header, source: memoryview, target: memoryview, codec: Codec, level: int) -> int | None:
    """Write the compressed form of a sealed object.

    Args:
        header: of the object in ``source``.
        source: the whole object, which was sealed or verified; only read.
        target: writable, of at most :func:`largest_compressed_bytes` bytes; undefined beyond the result.
        codec: any but ``NONE``.

    Returns:
        How many bytes of ``target`` are the object, or ``None`` when they are too few for it: it does not pay.
    """
    used = codecs.encode(codec, level, source[HEADER_BYTES:], target[HEADER_BYTES:])
    if used is None or used >= header.raw_bytes:
        return None
    payload = target[HEADER_BYTES : HEADER_BYTES + used]
    write_header(target, header._replace(codec=codec, stored_bytes=used, stored_checksum=checksum(payload)))
    return HEADER_BYTES + used


def restore(stored: memoryview, target: memoryview, key: ObjectKey) -> Header:
    """Verify a compressed object and write the sealed object that it was made of.

    Args:
        stored: the whole object as it came from the medium.
        target: writable, of exactly the size that the sealed object must have.
        key: the name it was asked for under.

    Raises:
        ObjectFormatError: it is not that object, or not of that size, or does not decode to what was compressed.
    """
    header = verify_stored(stored, key)
    raw_bytes = len(target) - HEADER_BYTES
    if header.raw_bytes != raw_bytes or header.codec is Codec.NONE:
        raise ObjectFormatError(
            f"{key}: header says {header.raw_bytes} raw bytes (codec {header.codec}); a compressed object of "
            f"{raw_bytes} is expected"
        )
    payload = target[HEADER_BYTES:]
    try:
        codecs.decode(header.codec, stored[HEADER_BYTES:], payload)
    except ObjectFormatError as error:
        raise ObjectFormatError(f"{key}: codec {header.codec}: {error}") from error
    if checksum(payload) != header.raw_checksum:
        raise ObjectFormatError(f"{key}: codec {header.codec}: the raw checksum does not match the decoded bytes")
    header = header._replace(codec=Codec.NONE, stored_bytes=raw_bytes, stored_checksum=header.raw_checksum)
    write_header(target, header)
    return header


def verify_any(stored: memoryview, key: ObjectKey) -> Header:
    """Check an object of any codec, what it decodes to included, with memory for a few blocks.

    Raises:
        ObjectFormatError: naming the first thing that is wrong.
    """
    header = verify_stored(stored, key)
    if header.codec is Codec.NONE:
        if header.raw_checksum != header.stored_checksum:
            raise ObjectFormatError(f"{key}: another raw checksum than the stored one, though codec is 0")
        return header
    digest = xxhash.xxh3_128()
    try:
        for block in codecs.decoded_blocks(header.codec, stored[HEADER_BYTES:], header.raw_bytes):
            digest.update(block)
    except ObjectFormatError as error:
        raise ObjectFormatError(f"{key}: codec {header.codec}: {error}") from error
    if digest.digest() != header.raw_checksum:
        raise ObjectFormatError(f"{key}: codec {header.codec}: the raw checksum does not match the decoded bytes")
    return header
