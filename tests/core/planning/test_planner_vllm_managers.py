"""The hit policies against vLLM's own managers: the blocks that they free, and the blocks that their hits need."""

from __future__ import annotations

import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.planning.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner
from tests.support.geometries import STATE, chunked, window

managers = pytest.importorskip("vllm.v1.core.single_type_kv_cache_manager", exc_type=ImportError)

tokens = st.integers(1, 2000)
sizes = st.integers(1, 300)


@given(tokens=tokens, size=sizes)
def test_the_first_needed_token_is_the_first_that_vllm_does_not_skip(tokens: int, size: int) -> None:
    def skipped(manager: type, **attributes: int) -> int:
        count: int = manager.get_num_skipped_tokens(types.SimpleNamespace(**attributes), tokens)  # type: ignore[attr-defined]
        return count

    windows = skipped(managers.SlidingWindowManager, sliding_window=size, extra_retained_tokens=0)
    assert window(size).first_needed_token(tokens) == windows
    chunks = skipped(managers.ChunkedLocalAttentionManager, attention_chunk_size=size)
    assert chunked(size).first_needed_token(tokens) == chunks
    assert STATE.first_needed_token(tokens) == skipped(managers.MambaManager)


@given(block=st.integers(1, 64), window_tokens=st.integers(2, 300), boundary_blocks=st.integers(1, 50))
def test_a_window_loads_as_many_blocks_as_a_hit_in_vllm_needs(
    block: int, window_tokens: int, boundary_blocks: int
) -> None:
    policy = HitPolicy("window", window_tokens)
    planner = HybridOffloadPlanner.build(
        [GroupGeometry(0, block, policy)], hash_block_size=block, max_model_len=1 << 20, hybrid_chunk_size=block
    )
    needed = planner.packs[0].needed_units(0, boundary_blocks * block)
    contiguous = managers.SlidingWindowManager._contiguous_blocks_for_hit(window_tokens, block, use_eagle=False)
    assert len(needed) == min(boundary_blocks, contiguous)
