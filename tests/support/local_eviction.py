"""Evictions from an engine's own prefix cache, group by group: they make the groups' local hits diverge."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MambaSpec, SlidingWindowSpec

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

KINDS = {"attention": FullAttentionSpec, "states": MambaSpec, "windows": SlidingWindowSpec}


def groups(kv_cache_config: KVCacheConfig, kind: str) -> list[int]:
    """Return the groups of a kind."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return [index for index, spec in enumerate(specs) if isinstance(spec, KINDS[kind])]


def evict(pool: BlockPool, kv_cache_config: KVCacheConfig, kind: str, max_groups: int | None = None) -> int:
    """Evict all cached blocks of a kind of group, or of the first groups of that kind; return their number."""
    chosen = groups(kv_cache_config, kind)[:max_groups]
    ids = {
        block.block_id
        for block in pool.blocks
        if block.block_hash is not None and get_group_id(block.block_hash) in chosen
    }
    pool.evict_blocks(ids)
    return len(ids)


def evict_path(pool: BlockPool, kv_cache_config: KVCacheConfig, kind: str, request: Request, first_token: int) -> int:
    """Evict the blocks that hold a request's tokens from ``first_token`` on in a kind of group; return their number."""
    ids = {
        block.block_id
        for group in groups(kv_cache_config, kind)
        for block in _path(
            pool, request, group, kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size, first_token
        )
    }
    pool.evict_blocks(ids)
    return len(ids)


def _path(pool: BlockPool, request: Request, group: int, block_tokens: int, first_token: int) -> Iterator[KVCacheBlock]:
    factor = block_tokens // pool.hash_block_size
    for index in range(first_token // block_tokens, len(request.block_hashes) // factor):
        yield from pool.get_cached_block(request.block_hashes[(index + 1) * factor - 1], [group]) or ()
