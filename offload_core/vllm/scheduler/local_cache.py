"""The engine's own prefix cache, group by group, as its block pool shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from offload_core.planning.planner import HybridOffloadPlanner

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request


class LocalPrefix(NamedTuple):
    """The prefix of one request that the engine holds itself."""

    computed_tokens: int
    """The depth in tokens from which the engine can go on."""
    attention_tokens: int
    """The depth of full attention. It is more than ``computed_tokens`` if the engine has evicted the states there."""


class LocalCache:
    """Reads the block pool of an engine whose groups are full attention and recurrent states with blocks of one size.

    Args:
        planner: of such a model, see :func:`has_only_attention_and_states`.
    """

    def __init__(self, block_pool: BlockPool, planner: HybridOffloadPlanner) -> None:
        self._pool = block_pool
        self._block_tokens = planner.hash_block_size
        self._attention_groups = [group.index for group in planner.groups if group.policy.kind == "full"]
        self._state_groups = [group.index for group in planner.groups if group.policy.kind == "state"]

    def prefix(self, request: Request, computed_tokens: int) -> LocalPrefix:
        """Return the local prefix of a request.

        If a state is held deeper than attention, vLLM reports no attention beyond the states. Then the result has none.

        Args:
            computed_tokens: the local prefix that vLLM reports, with or without the states at its end.
        """
        end = min((request.num_tokens - 1) // self._block_tokens, len(request.block_hashes))
        depth = computed_tokens // self._block_tokens
        while depth < end and self._holds(request, depth, self._attention_groups):
            depth += 1
        resumable = depth
        while resumable and not self._holds(request, resumable - 1, self._state_groups):
            resumable -= 1
        if resumable < depth and any(self._holds(request, block, self._state_groups) for block in range(depth, end)):
            depth = resumable
        return LocalPrefix(resumable * self._block_tokens, depth * self._block_tokens)

    def forget_attention(self, request: Request, boundary_tokens: int) -> None:
        """Remove the last block of attention before a boundary from the prefix cache.

        Requests that use the block keep it.
        """
        block_hash = request.block_hashes[boundary_tokens // self._block_tokens - 1]
        group = self._attention_groups[0]  # without one group's block there is no hit in the others
        while blocks := self._pool.get_cached_block(block_hash, [group]):  # there may be several with these tokens
            self._pool.evict_blocks({block.block_id for block in blocks})

    def _holds(self, request: Request, block: int, groups: list[int]) -> bool:
        return self._pool.get_cached_block(request.block_hashes[block], groups) is not None


class LocalTails:
    """Reads where the engine's own hits end inside a block. The connector is asked from the block's begin on.

    A load takes the place of such a hit only if it ends behind it.
    """

    def __init__(self, block_pool: BlockPool, planner: HybridOffloadPlanner) -> None:
        self._pool = block_pool
        self._hash_tokens = planner.hash_block_size
        self._block_tokens = max(planner.scheduler_block_size, *(group.block_size_tokens for group in planner.groups))
        self._groups = [group.index for group in planner.groups]

    def end(self, request: Request, computed_tokens: int) -> int:
        """Return the end of the engine's own hit in tokens, as far as all groups have it at the same place."""
        first = computed_tokens // self._hash_tokens
        behind = (computed_tokens + self._block_tokens - 1) // self._hash_tokens
        last = min((request.num_tokens - 1) // self._hash_tokens, len(request.block_hashes), behind)
        for end in range(last, first, -1):
            if self._pool.get_cached_block(request.block_hashes[end - 1], self._groups) is not None:
                return end * self._hash_tokens
        return computed_tokens


def has_only_attention_and_states(planner: HybridOffloadPlanner) -> bool:
    """Return whether all groups are full attention or recurrent, with both kinds present and blocks of one size."""
    kinds = {group.policy.kind for group in planner.groups}
    sizes = {group.block_size_tokens for group in planner.groups}
    return kinds == {"full", "state"} and sizes == {planner.hash_block_size}
