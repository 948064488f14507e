"""A stored object: a head before its bytes and a tail after them, both with a digest of its key.

A medium may report success for an object of another size or key, or for a part of an object. The head and the tail of
the shared memory are therefore cleared before a load and compared after it.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the child imports nothing of the core
    from offload_core.api import ObjectKey

_MAGIC = b"OFNIXL\x00\x01"
_HEAD = struct.Struct("<8sQ16s")
_DIGEST_BYTES = 16

HEAD_BYTES = _HEAD.size
OVERHEAD_BYTES = HEAD_BYTES + _DIGEST_BYTES
"""The bytes that a stored object has more than its content."""


def write_frame(memory: memoryview, key: ObjectKey, nbytes: int) -> None:
    """Write the head and the tail of an object with a content of ``nbytes`` to both ends of ``memory``."""
    head, tail = _frame(key, nbytes)
    memory[:HEAD_BYTES] = head
    memory[-_DIGEST_BYTES:] = tail


def clear_frame(memory: memoryview) -> None:
    """Remove the head and the tail of an earlier object, so that they cannot be taken for those of the next."""
    memory[:HEAD_BYTES] = bytes(HEAD_BYTES)
    memory[-_DIGEST_BYTES:] = bytes(_DIGEST_BYTES)


def is_whole(memory: memoryview, key: ObjectKey, nbytes: int) -> bool:
    """Return whether the ends of ``memory`` are those of the object of ``key`` with a content of ``nbytes``."""
    head, tail = _frame(key, nbytes)
    return memory[:HEAD_BYTES] == head and memory[-_DIGEST_BYTES:] == tail


def _frame(key: ObjectKey, nbytes: int) -> tuple[bytes, bytes]:
    digest = hashlib.blake2b(key.path.encode(), digest_size=_DIGEST_BYTES).digest()
    return _HEAD.pack(_MAGIC, nbytes, digest), digest
