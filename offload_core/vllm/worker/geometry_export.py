"""The export of this engine's geometry, for ``offload-core plan``, to the configuration's ``geometry_file``."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from offload_core.config.geometry_file import BlockPages, KVCacheGeometry, KVCacheGroup, save_geometry
from offload_core.memory.canonical import CanonicalKVCacheRef, CanonicalKVCaches
from offload_core.planning.planner import HybridOffloadPlanner

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)


def engine_geometry(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, planner: HybridOffloadPlanner, caches: CanonicalKVCaches
) -> KVCacheGeometry:
    """Return the geometry behind this engine's plan, with the plan's chunk size.

    Args:
        caches: the caches of one rank; their groups are in the planner's order.
    """
    return KVCacheGeometry(
        model=str(vllm_config.model_config.model),
        hash_block_size_tokens=planner.hash_block_size,
        scheduler_block_size_tokens=planner.scheduler_block_size,
        max_model_len=planner.max_model_len,
        hybrid_chunk_size=planner.hybrid_chunk_size,
        lookahead_tokens=planner.lookahead_blocks * planner.hash_block_size,
        tails=bool(planner.tail_packs),
        ranks=vllm_config.parallel_config.world_size,
        groups=[
            KVCacheGroup(
                index=group.index,
                name=_group_name(kv_cache_config.kv_cache_groups[group.index].layer_names),
                block_size_tokens=group.block_size_tokens,
                policy=group.policy,
                pages=_block_pages(refs),
            )
            for group, refs in zip(planner.groups, caches.group_refs, strict=True)
        ],
    )


def write_in_background(geometry: KVCacheGeometry, path: Path) -> None:
    """Write the file on a separate thread. An error is a warning; neither an error nor a hung disk stops the engine."""
    threading.Thread(target=_write, args=(geometry, path), name="offload-geometry", daemon=True).start()


def _write(geometry: KVCacheGeometry, path: Path) -> None:
    try:
        save_geometry(geometry, path)
    except (OSError, ValueError) as error:  # ValueError: the text is not a path
        logger.warning(
            "geometry_file: %r could not be written (%s); the engine runs without it. Set it to a file in an existing "
            "folder with write permission for the engine",
            str(path),
            error,
        )


def _group_name(layer_names: list[str]) -> str:
    more = len(layer_names) - 1
    return layer_names[0] + (f" and {more} more" if more else "")


def _block_pages(refs: tuple[CanonicalKVCacheRef, ...]) -> list[BlockPages]:
    sizes = Counter(ref.page_size_bytes for ref in refs)
    return [BlockPages(count=count, page_bytes=page_bytes) for page_bytes, count in sizes.items()]
