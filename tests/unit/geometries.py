"""Random group geometries, small enough to be checked token by token."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from offload_core.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner

FULL = HitPolicy("full")
STATE = HitPolicy("state")

# With these the boundaries of mixed groups stay close enough together to meet several in a short sequence.
_FACTORS = (1, 2, 3, 4, 6, 8)


def window(tokens: int) -> HitPolicy:
    return HitPolicy("window", tokens)


policies = st.one_of(st.just(FULL), st.just(STATE), st.integers(1, 40).map(window))


@dataclass(frozen=True)
class Geometry:
    groups: tuple[GroupGeometry, ...]
    hash_block_size: int
    hybrid_chunk_size: int | None

    def plan(self, max_model_len: int = 1 << 20) -> HybridOffloadPlanner:
        return HybridOffloadPlanner.build(
            self.groups,
            hash_block_size=self.hash_block_size,
            max_model_len=max_model_len,
            hybrid_chunk_size=self.hybrid_chunk_size,
        )


@st.composite
def geometries(draw: st.DrawFn, *, default_chunk: bool | None = None) -> Geometry:
    """Groups, hash block size and chunk size; ``default_chunk`` asks for the default chunk size or for none of it."""
    hash_block_size = draw(st.sampled_from((1, 2, 4)))
    blocks = st.sampled_from(_FACTORS).map(lambda factor: factor * hash_block_size)
    drawn = draw(st.lists(st.tuples(blocks, policies), min_size=1, max_size=4))
    groups = tuple(GroupGeometry(index, block, policy) for index, (block, policy) in enumerate(drawn))
    chunks = st.one_of(
        st.sampled_from((*_FACTORS, 12, 24)).map(lambda factor: factor * hash_block_size), st.integers(1, 60)
    )
    none = draw(st.booleans()) if default_chunk is None else default_chunk
    return Geometry(groups, hash_block_size, None if none else draw(chunks))
