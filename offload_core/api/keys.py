"""The name of a stored object."""

from __future__ import annotations

from typing import NamedTuple


class ObjectKey(NamedTuple):
    """Names one stored object: a pack's bytes for one chunk of tokens, as one engine rank sees them.

    The engine's block hashes are chained, so ``chunk_hash`` (the hash at the chunk's last hash block) names the
    whole prefix up to the chunk's end, per-request identity (LoRA, cache salt, multimodal inputs) included.
    Nothing is hashed again here.
    """

    namespace: str
    """Hex digest of the rank's fingerprint (64 characters)."""
    pack: str
    """Name of the pack, made of ``[a-z0-9-]``."""
    chunk_hash: bytes
    """The engine's chained block hash, 1 to 64 bytes."""

    @property
    def path(self) -> str:
        """``namespace/pack/hash`` in characters that every file system and object store accepts."""
        return f"{self.namespace}/{self.pack}/{self.chunk_hash.hex()}"

    def __str__(self) -> str:
        return f"{self.namespace[:12]}…/{self.pack}/{self.chunk_hash.hex()}"
