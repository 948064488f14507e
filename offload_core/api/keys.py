"""Names of stored objects and of chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple, cast, overload


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


def object_keys(namespace: str, pack: str, chunk_hashes: Iterable[bytes]) -> Iterator[ObjectKey]:
    """Name many objects of one pack, at a third of what the constructor costs for each: lookups name thousands."""
    fields = zip(repeat(namespace), repeat(pack), chunk_hashes)
    return cast("Iterator[ObjectKey]", map(tuple.__new__, repeat(ObjectKey), fields))


class ChunkHashes(Sequence[bytes]):
    """The hash of each chunk of one pack: a view of the engine's block hashes, which may grow meanwhile.

    Nothing of them is touched before it is asked for. Slices go upwards.

    Args:
        block_hashes: the engine's chained hashes of one sequence of tokens.
        hash_factor: block hashes per chunk; the last one names the chunk.
    """

    def __init__(self, block_hashes: Sequence[bytes], hash_factor: int) -> None:
        self._block_hashes = block_hashes
        self._hash_factor = hash_factor

    def __len__(self) -> int:
        return len(self._block_hashes) // self._hash_factor

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        units, factor = range(len(self))[index], self._hash_factor
        if isinstance(units, int):
            return self._block_hashes[(units + 1) * factor - 1]
        return self._block_hashes[(units.start + 1) * factor - 1 : units.stop * factor : units.step * factor]


class ChunkRef(NamedTuple):
    """One pack's chunk on every rank: an :class:`ObjectKey` before the namespaces of the ranks complete it."""

    pack: str
    chunk_hash: bytes
    adapter: str = ""
    """Digest of the LoRA adapter's files, part of the namespace; empty for the model itself."""
