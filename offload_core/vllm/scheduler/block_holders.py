"""The right time to report a failed load to vLLM's scheduler, so that its request cannot get stuck there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from offload_core.planning.planner import HybridOffloadPlanner

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


@dataclass(frozen=True)
class _Holder:
    blocks: int
    needed_blocks: int
    ours: bool
    failed: bool = False


class BlockHolders:
    """Requests that hold blocks without running: their load goes on, has ended, or has failed without a report.

    vLLM frees the blocks of a request whose load has failed. Then it tries to admit the request with all its tokens,
    before it looks at requests behind it. If those hold the blocks that the request lacks, neither ever runs (seen with
    0.32). So a failure is *withheld* until the request is sure to fit beside all other holders.

    If only failed requests hold blocks, they are reported one at a time, the last one first. When the first one's turn
    comes, no other request holds blocks. No load should begin while a failure is withheld: then the wait ends with the
    loads that have begun.

    Args:
        num_blocks: number of blocks in the engine's pool that requests can have.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._holders: dict[str, _Holder] = {}  # in the order in which their loads began

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._holders

    def load_begins(self, request_id: str, blocks: int, needed_blocks: int, *, ours: bool = True) -> None:
        """Add a request that holds ``blocks`` blocks while it loads and needs at most ``needed_blocks`` to run.

        Args:
            ours: whether this connector loads; otherwise another one may load for the request.
        """
        self._holders[request_id] = _Holder(blocks, needed_blocks, ours)

    def load_fails(self, request_id: str) -> None:
        """Note that a request's load has failed. No effect on a request that is no holder."""
        if (holder := self._holders.get(request_id)) is not None:
            self._holders[request_id] = replace(holder, failed=True)

    def withholds(self, request_id: str) -> bool:
        """Return whether the failure of a request's load is withheld."""
        holder = self._holders.get(request_id)
        return holder is not None and holder.failed

    def loads_beside(self, request_id: str) -> bool:
        """Return whether any other request holds blocks for a load of this connector."""
        return any(holder.ours and name != request_id for name, holder in self._holders.items())

    @property
    def withholds_failures(self) -> bool:
        """True if the failure of any load is withheld."""
        return any(holder.failed for holder in self._holders.values())

    @property
    def lacking_blocks(self) -> int:
        """Number of blocks that all holders together still need to run, at most."""
        return sum(max(0, holder.needed_blocks - holder.blocks) for holder in self._holders.values())

    def needed_blocks(self, request_ids: Collection[str]) -> dict[str, int]:
        """Return the blocks that each of the holders among some requests needs to run, at most."""
        return {name: self._holders[name].needed_blocks for name in request_ids if name in self._holders}

    def remove(self, request_ids: Collection[str]) -> None:
        """Remove requests that run, have finished, or whose failure is reported."""
        if self._holders:
            for request_id in request_ids:
                self._holders.pop(request_id, None)

    def reportable_failures(self) -> list[str]:
        """Return the requests whose failure can be reported to the scheduler now."""
        failed = [request_id for request_id, holder in self._holders.items() if holder.failed]
        if not failed:
            return []
        fitting = list(self._fitting(failed))
        if not fitting and len(failed) == len(self._holders):
            return failed[-1:]
        return fitting

    def _fitting(self, failed: Collection[str]) -> Iterator[str]:
        held = sum(holder.blocks for holder in self._holders.values())
        for request_id in failed:
            holder = self._holders[request_id]
            if self._num_blocks - (held - holder.blocks) >= holder.needed_blocks:
                yield request_id


def held_and_needed_blocks(planner: HybridOffloadPlanner, request: Request, blocks: KVCacheBlocks) -> tuple[int, int]:
    """Return the number of blocks that a request holds, and the result of :func:`needed_blocks`."""
    return held_blocks(blocks), needed_blocks(planner, request, len(blocks.blocks))


def held_blocks(blocks: KVCacheBlocks) -> int:
    """Return the number of blocks in a request's tables."""
    return sum(not block.is_null for table in blocks.blocks for block in table)


def needed_blocks(planner: HybridOffloadPlanner, request: Request, num_groups: int) -> int:
    """Return an upper limit of the blocks that a request needs for all its tokens.

    Args:
        num_groups: the engine's groups, also those that nothing is offloaded of.
    """
    return most_blocks(request.num_tokens, [group.block_size_tokens for group in planner.groups], num_groups)


def most_blocks(num_tokens: int, block_sizes: Iterable[int], num_groups: int) -> int:
    """Return an upper limit of the blocks that a request needs for some tokens.

    Args:
        block_sizes: tokens per block of each group that keeps its blocks.
        num_groups: the engine's groups.
    """
    # Three more per group, for the engine's additions: states under way, speculated tokens, rings.
    return sum(-(-num_tokens // size) for size in block_sizes) + 3 * num_groups


def has_free_blocks(block_pool: BlockPool | None, number: int) -> bool:
    """Return whether the engine's pool has so many free blocks; false as long as the pool is not known."""
    return block_pool is not None and bool(block_pool.get_num_free_blocks() >= number)
