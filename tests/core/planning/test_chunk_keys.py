"""The hashes of chunks, against a list of all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offload_core.planning.chunk_keys import ChunkHashes
from offload_core.planning.hit_policy import HitPolicy
from offload_core.planning.planner import GroupGeometry, HybridOffloadPlanner

BLOCK = 16


@given(
    blocks=st.integers(0, 40),
    hash_factor=st.integers(1, 5),
    lookahead_blocks=st.integers(0, 3),
    start=st.integers(0, 45),
    stop=st.integers(0, 45),
    step=st.integers(1, 4),
)
def test_a_chunk_is_named_by_the_last_block_that_its_content_depends_on(
    blocks: int, hash_factor: int, lookahead_blocks: int, start: int, stop: int, step: int
) -> None:
    hashes = [bytes([block]) for block in range(blocks)]
    named = ChunkHashes(hashes, hash_factor, lookahead_blocks)
    ends = range(hash_factor + lookahead_blocks, blocks + 1, hash_factor)
    expected = [hashes[end - 1] for end in ends]
    assert list(named) == expected
    assert list(named[start:stop:step]) == expected[start:stop:step]


@given(
    tokens=st.integers(0, 400),
    lookahead_tokens=st.integers(0, 33),
    chunk_blocks=st.integers(1, 4),
)
def test_names_and_boundaries_agree(tokens: int, lookahead_tokens: int, chunk_blocks: int) -> None:
    planner = HybridOffloadPlanner.build(
        [GroupGeometry(0, BLOCK, HitPolicy("full"))],
        hash_block_size=BLOCK,
        max_model_len=4096,
        hybrid_chunk_size=chunk_blocks * BLOCK,
        lookahead_tokens=lookahead_tokens,
    )
    (pack,) = planner.packs
    blocks = tokens // BLOCK
    hashes = [bytes([block]) for block in range(blocks)]
    named = ChunkHashes(hashes, pack.hash_factor, pack.lookahead_blocks)
    assert len(named) == pack.named_units(blocks) == planner.named_tokens(blocks) // planner.boundary_tokens
    for unit, name in enumerate(named):
        assert name == hashes[pack.hash_index(unit)]
        known_tokens = (pack.hash_index(unit) + 1) * BLOCK
        assert known_tokens >= pack.tokens_in(unit + 1) + lookahead_tokens
        assert known_tokens - BLOCK < pack.tokens_in(unit + 1) + lookahead_tokens
    resumable = [
        boundary
        for boundary in range(0, tokens, planner.boundary_tokens)
        if boundary == 0 or boundary // planner.boundary_tokens <= len(named)
    ]
    assert planner.replay_boundary(tokens) == max(resumable, default=0)
