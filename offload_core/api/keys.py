"""The name of a stored object."""

from __future__ import annotations

import re
from typing import NamedTuple

_PATH = re.compile(r"([0-9a-f]{64})/([a-z0-9-]{1,64})/((?:[0-9a-f]{2}){1,64})")


class ObjectKey(NamedTuple):
    """The name of one stored object: the bytes of one pack for one chunk of tokens on one rank of an engine.

    ``chunk_hash`` is the engine's hash of the chunk's last hash block. The engine's block hashes are chained, so it
    names the whole prefix up to the chunk's end. It includes the request's identity: LoRA, cache salt and multimodal
    inputs. Nothing is hashed again here.

    A backend must treat all three fields as opaque, and two keys are equal only if all three are equal (C1).
    """

    namespace: str
    """Hex digest of the rank's fingerprint (64 characters)."""
    pack: str
    """Name of the pack, made of ``[a-z0-9-]``."""
    chunk_hash: bytes
    """The engine's chained block hash, 1 to 64 bytes."""

    @property
    def path(self) -> str:
        """``namespace/pack/hash``, in characters that every file system and object store accepts."""
        return f"{self.namespace}/{self.pack}/{self.chunk_hash.hex()}"

    @classmethod
    def from_path(cls, path: str) -> ObjectKey:
        """Return the key whose :attr:`path` is ``path``, for listings.

        Raises:
            ValueError: no key has this path. The name is that of a foreign file, or of an unfinished one.
        """
        match = _PATH.fullmatch(path)
        if match is None:
            raise ValueError(
                f"{path!r} is no path of an object; one is namespace/pack/hash, such as {'ab' * 32}/full-u256/0f1e"
            )
        return cls(match[1], match[2], bytes.fromhex(match[3]))

    def __str__(self) -> str:
        return f"{self.namespace[:12]}…/{self.pack}/{self.chunk_hash.hex()}"
