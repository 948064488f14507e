"""The plan of a load: stored units, matched with the blocks that the engine has allocated for them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from offload_core.memory.block_copier import BlockSlice
from offload_core.planning.planner import GroupGeometry, HybridOffloadPlanner, Pack
from offload_core.vllm.metadata import ChunkTransfer
from offload_core.vllm.scheduler.request_state import RequestState

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks

logger = logging.getLogger(__name__)

NULL_BLOCK_ID = 0


def plan_load(
    planner: HybridOffloadPlanner,
    state: RequestState,
    blocks: KVCacheBlocks,
    computed_tokens: int,
    boundary_tokens: int,
) -> list[ChunkTransfer] | None:
    """Match stored units with allocated blocks; return ``None`` if an allocated block would stay unfilled."""
    tables = {
        group.index: [block.block_id for block in blocks.blocks[group.index]]
        for pack in planner.packs
        for group in pack.groups
    }
    unfilled = {
        group.index: _blocks_to_fill(group, tables[group.index], computed_tokens, boundary_tokens)
        for pack in planner.packs
        for group in pack.groups
    }
    chunks: list[ChunkTransfer] = []
    for pack in planner.all_packs:
        for unit in pack.needed_units(computed_tokens, boundary_tokens):
            slices = tuple(
                _slice(pack, group, unit, tables[group.index], computed_tokens, unfilled[group.index])
                for group in pack.groups
            )
            if any(part.block_ids for part in slices):
                chunks.append(ChunkTransfer(state.ref(pack, unit), slices))
    for pack in planner.packs:
        for index in (group.index for group in pack.groups):
            if unfilled[index]:
                logger.error(
                    "request %s: the engine allocated blocks %s of group %d for a load to token %d, but pack %s does "
                    "not hold them; the request is recomputed. Please report this with the model's name.",
                    state.request.request_id, sorted(unfilled[index]), index, boundary_tokens, pack.name,
                )  # fmt: skip
                return None
    return chunks


def _blocks_to_fill(group: GroupGeometry, table: Sequence[int], computed_tokens: int, boundary_tokens: int) -> set[int]:
    """Return the positions, in the group's block table, of blocks that the engine expects to be loaded."""
    size = group.block_size_tokens
    return {
        position
        for position in range(computed_tokens // size, -(-boundary_tokens // size))
        if table[position] != NULL_BLOCK_ID
    }


def _slice(
    pack: Pack, group: GroupGeometry, unit: int, table: Sequence[int], computed_tokens: int, unfilled: set[int]
) -> BlockSlice:
    """Return the unit's trailing blocks, from the first allocated one on, and remove them from ``unfilled``."""
    positions = pack.block_range(group, unit)
    start = max(positions.start, computed_tokens // group.block_size_tokens)
    ids = table[start : positions.stop]
    while ids and ids[0] == NULL_BLOCK_ID:
        start += 1
        ids = ids[1:]
    if NULL_BLOCK_ID in ids:
        return BlockSlice(0, ())  # a hole: the unit's allocated blocks stay unfilled, and the load is refused
    unfilled.difference_update(range(start, positions.stop))
    return BlockSlice(start - positions.start if ids else 0, tuple(ids))
