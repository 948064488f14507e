"""Random group geometries, small enough to be checked token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st

from offload_core.api.errors import PlanError
from offload_core.planning.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner, Pack, UnitRange

FULL = HitPolicy("full")
STATE = HitPolicy("state")

# With these the boundaries of mixed groups stay close enough together to meet several in a short sequence.
_FACTORS = (1, 2, 3, 4, 6, 8)


def window(tokens: int) -> HitPolicy:
    return HitPolicy("window", tokens)


def chunked(tokens: int) -> HitPolicy:
    return HitPolicy("chunked", attention_chunk_tokens=tokens)


def needs(policy: HitPolicy, token: int, boundary: int) -> bool:
    """The definition of a hit: does a request that goes on from ``boundary`` read the cache entry of ``token``?"""
    if policy.kind == "full":
        return True
    if policy.kind == "state":
        return token == boundary - 1
    if policy.kind == "window":
        return token > boundary - policy.window_tokens
    return token // policy.attention_chunk_tokens == boundary // policy.attention_chunk_tokens


def drive(
    planner: HybridOffloadPlanner, there: Callable[[Pack, int], bool], computed: int, limit: int, attention: int = 0
) -> tuple[int, list[tuple[UnitRange, ...]]]:
    """Run a search with the answers of ``there``; returns the boundary that it found and its questions."""
    questions: list[tuple[UnitRange, ...]] = []
    search = planner.search(computed, limit, local_attention_tokens=attention)
    try:
        questions.append(next(search))
        while True:
            assert all(units for _, units in questions[-1]), "an empty question can be asked for ever"
            answers = [[there(pack, unit) for unit in units] for pack, units in questions[-1]]
            questions.append(search.send(answers))
    except StopIteration as found:
        return found.value.usable_tokens, questions


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

    def with_chunk(self, hybrid_chunk_size: int | None) -> Geometry:
        return Geometry(self.groups, self.hash_block_size, hybrid_chunk_size)

    def unit_tokens(self, group: GroupGeometry, chunk: int) -> int:
        return chunk if chunk % group.block_size_tokens == 0 else group.block_size_tokens

    def works(self) -> bool:
        try:
            self.plan()
        except PlanError:
            return False
        return True


def geometries(*, default_chunk: bool | None = None) -> st.SearchStrategy[Geometry]:
    """Geometries that can be planned for; ``default_chunk`` asks for the default chunk size or for none of it."""
    return any_geometries(default_chunk=default_chunk).filter(Geometry.works)


@st.composite
def any_geometries(draw: st.DrawFn, *, default_chunk: bool | None = None) -> Geometry:
    """Groups, hash block size and chunk size; some of them are refused."""
    hash_block_size = draw(st.sampled_from((1, 2, 4)))
    blocks = st.sampled_from(_FACTORS).map(lambda factor: factor * hash_block_size)
    attention_chunks = st.sampled_from((*_FACTORS, 12, 16, 24, 48)).map(
        lambda factor: chunked(factor * hash_block_size)
    )
    policies = st.one_of(st.just(FULL), st.just(STATE), st.integers(1, 40).map(window), attention_chunks)
    drawn = draw(st.lists(st.tuples(blocks, policies), min_size=1, max_size=4))
    groups = tuple(GroupGeometry(index, block, policy) for index, (block, policy) in enumerate(drawn))
    chunks = st.one_of(
        st.sampled_from((*_FACTORS, 12, 24)).map(lambda factor: factor * hash_block_size), st.integers(1, 60)
    )
    none = draw(st.booleans()) if default_chunk is None else default_chunk
    return Geometry(groups, hash_block_size, None if none else draw(chunks))
