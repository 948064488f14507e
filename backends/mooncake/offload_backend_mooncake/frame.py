"""The bytes of a stored object: a head of 40 bytes, then the payload.

Mooncake gathers both from two places of memory and scatters them again, so nothing is copied. The head makes empty
objects possible, which Mooncake refuses. It also shows bytes of another object. A put that has timed out may write
them when its owner goes on: its memory belongs to another object by then.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import xxhash

from offload_core.api import CHECK_BYTES, LoadCheck, StoreSeal

_HEAD = struct.Struct("<8sQ16sQ")  # magic, bytes of the payload, digest of the name, checksum of the payload
_MAGIC = b"OCmoon2\n"
HEAD_BYTES = _HEAD.size
_LAST_BYTES = 4096
"""The bytes at the beginning of a payload that come last in its checksum, since a seal completes them last."""


class Frames:
    """Heads for a batch of objects, and the addresses of heads and payloads. Keep it while Mooncake uses them.

    Args:
        names: the objects' names.
        buffers: one buffer per name; read-only ones will do for a put.
    """

    def __init__(self, names: Sequence[str], buffers: Sequence[memoryview]) -> None:
        self._names = names
        self._buffers = buffers
        self._payloads = [np.frombuffer(buffer, np.uint8) if len(buffer) else None for buffer in buffers]
        self._heads = np.zeros((len(names), HEAD_BYTES), np.uint8)

    def seal(self, seals: Sequence[StoreSeal] = ()) -> None:
        """Write the heads.

        Args:
            seals: one per object, each of which completes its payload before; or none.
        """
        nobody: Sequence[StoreSeal | None] = [None] * len(self._names)
        for head, name, buffer, seal in zip(self._heads, self._names, self._buffers, seals or nobody, strict=True):
            head[:] = np.frombuffer(_head(name, buffer, seal), np.uint8)

    def is_whole(self, index: int, check: LoadCheck | None = None) -> bool:
        """Return whether one object is the one of its name, byte for byte.

        Args:
            check: the core's check. If it finds the object right, the payload is not summed a second time.
        """
        name, buffer = self._names[index], self._buffers[index]
        magic, nbytes, digest, checksum = _HEAD.unpack(self._heads[index].tobytes())
        if (magic, nbytes, digest) != (_MAGIC, len(buffer), _digest(name)):
            return False
        is_right = check is not None and len(buffer) > 0 and check.filled(len(buffer))
        return is_right or checksum == _checksum(buffer)

    @property
    def addresses(self) -> list[list[int]]:
        """Addresses of the parts of each object."""
        return [
            [head.ctypes.data, *([] if payload is None else [payload.ctypes.data])]
            for head, payload in zip(self._heads, self._payloads, strict=True)
        ]

    @property
    def sizes(self) -> list[list[int]]:
        """Bytes of the parts of each object."""
        return [[HEAD_BYTES, *([len(buffer)] if len(buffer) else [])] for buffer in self._buffers]

    @property
    def regions(self) -> list[tuple[int, int]]:
        """Address and bytes of each piece of memory: all heads, and each payload once."""
        payloads = {payload.ctypes.data: payload.nbytes for payload in self._payloads if payload is not None}
        return [(self._heads.ctypes.data, self._heads.nbytes), *payloads.items()]


def payload_bytes(object_bytes: int) -> int | None:
    """Return the payload's bytes in an object of ``object_bytes``, or ``None`` if it has no head."""
    return object_bytes - HEAD_BYTES if object_bytes >= HEAD_BYTES else None


def _head(name: str, buffer: memoryview, seal: StoreSeal | None) -> bytes:
    return _HEAD.pack(_MAGIC, len(buffer), _digest(name), _checksum(buffer, seal))


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def _checksum(buffer: memoryview, seal: StoreSeal | None = None) -> int:
    """Return the checksum of a payload. A seal reads each part just before, and completes the payload."""
    if seal is not None and seal.head_bytes != _LAST_BYTES:  # another core, or a small object
        seal.seal()
    checksum = xxhash.xxh3_64()  # other threads can run meanwhile, unlike in xxhash's one-shot functions
    for start in range(_LAST_BYTES, len(buffer), CHECK_BYTES):
        part = buffer[start : start + CHECK_BYTES]
        if seal is not None:
            seal.stored(len(part))
        checksum.update(part)
    if seal is not None:
        seal.seal()
    checksum.update(buffer[:_LAST_BYTES])
    return checksum.intdigest()
