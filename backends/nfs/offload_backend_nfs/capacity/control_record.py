"""The form of control records on the medium: a line with kind, version and checksum, and then the body.

The checksum of a batch or a usage log includes the file's name. So a copy under another name is damaged.
Lists of objects have one line per object. They need no parser that nests, and no more memory than their bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import xxhash

from offload_backend_nfs.storage.layout import key_of
from offload_core.api import ObjectKey

_VERSION = 1
_PRODUCT = b"offload-core"
_MAX_LINE_BYTES = 512


class UnknownVersionError(OSError):
    """Another version of this backend wrote the record."""


class DamagedRecordError(OSError):
    """The record's bytes differ from the bytes that were written."""


def seal(kind: str, body: bytes, name: str = "") -> bytes:
    """Return a record: ``offload-core KIND VERSION CHECKSUM``, and then the body."""
    return b"%s %s %d %s\n" % (_PRODUCT, kind.encode(), _VERSION, _checksum(body, name)) + body


def unseal(kind: str, content: bytes, name: str = "") -> bytes:
    """Return the body of a record.

    Raises:
        UnknownVersionError: the record is complete, but this code does not know its version.
        DamagedRecordError: the record is not complete, or has another name or kind.
    """
    end = content.find(b"\n", 0, _MAX_LINE_BYTES)
    if end < 0:
        raise DamagedRecordError(f"it does not begin with '{_PRODUCT.decode()} {kind} VERSION CHECKSUM'")
    body = content[end + 1 :]
    magic, _, checksum = content[:end].rpartition(b" ")
    product, _, version = magic.rpartition(b" ")
    if product != b"%s %s" % (_PRODUCT, kind.encode()) or checksum != _checksum(body, name):
        raise DamagedRecordError(f"it is no complete {kind} record: its checksum does not match")
    if version != b"%d" % _VERSION:
        raise UnknownVersionError(
            f"the {kind} has version {version.decode(errors='replace')}, and this backend knows version {_VERSION} "
            "only; run the same release of offload-core on all hosts"
        )
    return body


def compress(body: bytes) -> bytes:
    """Return the body in less bytes, for :func:`decompress`."""
    return zlib.compress(body, 1)


def decompress(body: bytes, max_bytes: int) -> bytes:
    """Return the body that :func:`compress` was given.

    Raises:
        DamagedRecordError: the content has another form, or the body has more than ``max_bytes``. No more is made.
    """
    decompressor = zlib.decompressobj()
    try:
        found = decompressor.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise DamagedRecordError(f"it cannot be decompressed: {error}") from error
    if len(found) > max_bytes or not decompressor.eof or decompressor.unused_data:
        raise DamagedRecordError(f"it is cut, or has more than {max_bytes} bytes")
    return found


def write_lines(values: Iterable[tuple[ObjectKey, float]]) -> bytes:
    """Return a line ``PATH NUMBER`` per object."""
    return b"".join(f"{key.path} {value!r}\n".encode() for key, value in values)


def read_lines(body: bytes) -> Iterator[tuple[ObjectKey, str]]:
    """Yield the keys and numbers of :func:`write_lines`, the numbers as text.

    Raises:
        DamagedRecordError: a line has another form.
    """
    start = 0
    while start < len(body):
        end = body.find(b"\n", start, start + _MAX_LINE_BYTES)
        if end < 0:
            raise DamagedRecordError(f"the line at byte {start} is not 'PATH NUMBER'")
        try:
            path, _, number = body[start:end].decode("ascii").partition(" ")
            yield key_of(path), number
        except ValueError as error:
            raise DamagedRecordError(f"the line at byte {start} is not 'PATH NUMBER': {error}") from error
        start = end + 1


def _checksum(body: bytes, name: str) -> bytes:
    digest = xxhash.xxh3_128(body)
    digest.update(name.encode())
    return digest.hexdigest().encode()
