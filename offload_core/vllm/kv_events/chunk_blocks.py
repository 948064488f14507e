"""One stored chunk as blocks of vLLM's KV cache groups: block hashes, the parent's hash, and token ids."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from offload_core.planning.packs import GroupGeometry, Pack
from offload_core.vllm.kv_events.vllm_events import block_extra_keys

if TYPE_CHECKING:
    from vllm.v1.request import Request

_BYTES_PER_HASH = 80
"""Memory of a block hash, which may outlive its request."""


class GroupBlocks(NamedTuple):
    """Adjacent blocks of one group in a stored chunk, in order."""

    group: GroupGeometry
    block_size: int
    """Tokens of each block: the group's block size, or those of the last hash of a tail that ends inside a block."""
    hashes: list[bytes]
    parent: bytes | None
    """The hash of the block before them; ``None`` at the start of a sequence."""
    token_ids: list[int]
    extra_keys: list[Any] | None


@dataclass(frozen=True, slots=True)
class ChunkBlocks:
    """The blocks of a pack in one chunk, taken from a request while it lives.

    Args:
        first_token: position of the first token. A window or a state covers the last tokens of its chunk only.
        parent: the block hash before ``first_token``.
        hashes: the engine's block hashes from there on.
        hash_block_size: tokens per hash.
        lora: id and name of the LoRA adapter.
        extra_keys: per group, the further parts of its blocks' identity, or nothing.
    """

    pack: Pack
    unit: int
    first_token: int
    parent: bytes | None
    hashes: tuple[bytes, ...]
    token_ids: array[int]
    hash_block_size: int
    lora: tuple[int, str] | None
    extra_keys: tuple[list[Any] | None, ...]

    @classmethod
    def of(cls, request: Request, pack: Pack, unit: int) -> ChunkBlocks:
        """Take the blocks of a chunk from a request that has its tokens and its block hashes."""
        hash_block_size = pack.unit_tokens // pack.hash_factor
        ranges = [pack.block_range(group, unit) for group in pack.groups]
        first = min(blocks.start * group.block_size_tokens for group, blocks in zip(pack.groups, ranges, strict=True))
        end = pack.tokens_in(unit + 1)
        first_hash, end_hash = first // hash_block_size, end // hash_block_size
        hashes = request.block_hashes
        lora = request.lora_request
        return cls(
            pack,
            unit,
            first,
            hashes[first_hash - 1] if first_hash else None,
            tuple(hashes[first_hash:end_hash]),
            array("i", request.all_token_ids[first:end]),
            hash_block_size,
            None if lora is None else (lora.adapter_id, lora.name),
            tuple(
                block_extra_keys(request, _spans(group, blocks, end, hash_block_size))
                for group, blocks in zip(pack.groups, ranges, strict=True)
            ),
        )

    @property
    def nbytes(self) -> int:
        """Estimated memory."""
        return self.token_ids.itemsize * len(self.token_ids) + _BYTES_PER_HASH * len(self.hashes)

    def groups(self) -> Iterator[GroupBlocks]:
        """Yield the blocks of each group, each with the hash of its last tokens as in vLLM's own events.

        A last block that is filled in part comes by itself. As vLLM announces it, it has the tokens of its last hash
        only, and its parent is the hash before them.
        """
        end = len(self.token_ids)
        for group, extra_keys in zip(self.pack.groups, self.extra_keys, strict=True):
            start = self.pack.block_range(group, self.unit).start * group.block_size_tokens - self.first_token
            blocks, filled = divmod(end - start, group.block_size_tokens)
            if blocks:
                keys = extra_keys and extra_keys[:blocks]
                yield self._adjacent(group, group.block_size_tokens, start, end - filled, keys)
            if filled:
                keys = extra_keys and extra_keys[blocks:]
                yield self._adjacent(group, self.hash_block_size, end - self.hash_block_size, end, keys)

    def _adjacent(
        self, group: GroupGeometry, block_size: int, start: int, end: int, extra_keys: list[Any] | None
    ) -> GroupBlocks:
        """Return the blocks between two positions, in tokens from the first token on."""
        first, hashes_per_block = start // self.hash_block_size, block_size // self.hash_block_size
        return GroupBlocks(
            group,
            block_size,
            list(self.hashes[first + hashes_per_block - 1 : end // self.hash_block_size : hashes_per_block]),
            self.hashes[first - 1] if first else self.parent,
            self.token_ids[start:end].tolist(),
            extra_keys,
        )


def _spans(group: GroupGeometry, blocks: range, end: int, hash_block_size: int) -> Iterator[tuple[int, int]]:
    """Yield the first token and the end of each block; see :meth:`ChunkBlocks.groups`."""
    size = group.block_size_tokens
    for position in blocks:
        block_end = (position + 1) * size
        yield (block_end - size, block_end) if block_end <= end else (end - hash_block_size, end)
