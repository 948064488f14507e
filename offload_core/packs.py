"""How a pack's payload is laid out, and the copies between it and the KV cache.

A payload is the concatenation, in the pack's group order and each group's layer order, of *page runs*: the pages of one
layer's stored blocks, oldest block first, unpadded. With two layers A and B and two stored blocks: ``A0 A1 B0 B1``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from offload_core.canonical import CanonicalKVCaches
from offload_core.planner import Pack


@dataclass(frozen=True)
class PageRun:
    """Where one layer's pages lie in a payload: ``blocks`` pages of ``page_bytes`` bytes from ``offset_bytes`` on."""

    group: int
    """Position of the layer's group in the pack."""
    tensor_index: int
    page_bytes: int
    blocks: int
    offset_bytes: int


@dataclass(frozen=True)
class PackLayout:
    """The payload of one pack's objects."""

    name: str
    runs: tuple[PageRun, ...]
    payload_bytes: int

    @classmethod
    def build(cls, pack: Pack, caches: CanonicalKVCaches, group_positions: Sequence[int]) -> PackLayout:
        """Lay out ``pack``; ``group_positions`` gives, for each of its groups, the position in ``caches``."""
        runs: list[PageRun] = []
        offset = 0
        for position, (group, cache_position) in enumerate(zip(pack.groups, group_positions, strict=True)):
            blocks = pack.stored_blocks(group)
            for ref in caches.group_refs[cache_position]:
                runs.append(PageRun(position, ref.tensor_index, ref.page_size_bytes, blocks, offset))
                offset += ref.page_size_bytes * blocks
        return cls(pack.name, tuple(runs), offset)


@dataclass(frozen=True)
class BlockSlice:
    """The blocks of one group that a copy touches: payload slots ``first_slot``, ``first_slot + 1``, … in order."""

    first_slot: int
    block_ids: tuple[int, ...]


class BlockCopier(Protocol):
    """Copies between KV cache blocks and payloads. Called by the engine's own thread only (invariant I2).

    The framework guarantees that block ids are within the tensors and that payloads have the layout's size. An
    implementation must have finished with the payload when it returns.
    """

    def gather(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> None:
        """Copy blocks (one slice per group of the pack) from the KV cache into ``payload``, int8 of shape (bytes,)."""
        ...

    def scatter(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> None:
        """Copy blocks (one slice per group of the pack) from ``payload`` into the KV cache."""
        ...


class CpuBlockCopier:
    """Plain copies by the calling thread, for KV caches in host memory."""

    def __init__(self, caches: CanonicalKVCaches) -> None:
        self._tensors = [tensor.tensor for tensor in caches.tensors]

    def gather(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> None:
        """Copy blocks from the KV cache into ``payload``; see :class:`BlockCopier`."""
        for cache_pages, payload_pages in self._pairs(layout, blocks, payload):
            payload_pages.copy_(cache_pages)

    def scatter(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> None:
        """Copy blocks from ``payload`` into the KV cache; see :class:`BlockCopier`."""
        for cache_pages, payload_pages in self._pairs(layout, blocks, payload):
            cache_pages.copy_(payload_pages)

    def _pairs(
        self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        spans = [tuple(_consecutive(part.block_ids)) for part in blocks]
        for run in layout.runs:
            pages = payload[run.offset_bytes : run.offset_bytes + run.blocks * run.page_bytes].view(run.blocks, -1)
            cache = self._tensors[run.tensor_index]
            first_slot = blocks[run.group].first_slot
            for slot, block_id, count in spans[run.group]:
                start = first_slot + slot
                yield cache[block_id : block_id + count, : run.page_bytes], pages[start : start + count]


def _consecutive(block_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield ``(position, first block id, count)`` for each run of consecutive ids, so that a run is one copy."""
    start = 0
    for position in range(1, len(block_ids) + 1):
        if position == len(block_ids) or block_ids[position] != block_ids[position - 1] + 1:
            yield start, block_ids[start], position - start
            start = position
