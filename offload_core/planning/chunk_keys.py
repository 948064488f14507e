"""The hashes of chunks and the keys of their objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple, cast, overload

from offload_core.api.keys import ObjectKey


def object_keys(namespace: str, pack: str, chunk_hashes: Iterable[bytes]) -> Iterator[ObjectKey]:
    """Yield the keys of many objects of one pack.

    Lookups name thousands of objects. This takes a third of the time of the constructor of each key.
    """
    fields = zip(repeat(namespace), repeat(pack), chunk_hashes)
    return cast("Iterator[ObjectKey]", map(tuple.__new__, repeat(ObjectKey), fields))


class ChunkHashes(Sequence[bytes]):
    """The hash of each chunk of one pack: a lazy view of the engine's block hashes, which may grow meanwhile.

    Slices must have a positive step.

    Args:
        block_hashes: the engine's chained hashes of one sequence of tokens.
        hash_factor: block hashes per chunk. The last one is the hash of the chunk.
        lookahead_blocks: block hashes behind a chunk that its content depends on. Then the last of these is its hash.
    """

    def __init__(self, block_hashes: Sequence[bytes], hash_factor: int, lookahead_blocks: int = 0) -> None:
        self._block_hashes = block_hashes
        self._hash_factor = hash_factor
        self._lookahead_blocks = lookahead_blocks

    def __len__(self) -> int:
        return max(0, len(self._block_hashes) - self._lookahead_blocks) // self._hash_factor

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        units, factor, ahead = range(len(self))[index], self._hash_factor, self._lookahead_blocks
        if isinstance(units, int):
            return self._block_hashes[(units + 1) * factor - 1 + ahead]
        return self._block_hashes[
            (units.start + 1) * factor - 1 + ahead : units.stop * factor + ahead : units.step * factor
        ]


class ChunkRef(NamedTuple):
    """One pack's chunk on all ranks. With the namespace of a rank it becomes an :class:`ObjectKey`."""

    pack: str
    chunk_hash: bytes
    adapter: str = ""
    """Digest of the LoRA adapter's files, which is part of the namespace; empty without an adapter."""
