"""Which tokens make an object, which objects make a hit: integer arithmetic, nothing else.

Words used here and everywhere in offload-core:

* *group*: layers that share one block table in the engine, with one block size and one hit policy.
* *unit*: the run of tokens whose blocks of one group go into one object: ``hybrid_chunk_size`` tokens where whole
  blocks fill that, else one block.
* *pack*: the groups that have the same unit and the same hit policy; they are stored as one object per unit.
* *boundary*: a token count at which every group's units end; a loaded prefix ends at a boundary.

The pages of a block larger than the chunk are not split on the token axis: vLLM takes external prefixes only at whole
blocks of every group, so splitting would make more objects and not one more hit.

Examples, one per kind of model. Each begins with its groups: index, block size, hit policy.

>>> def plan(*groups, hash_block_size, chunk):
...     geometry = [GroupGeometry(index, block, policy) for index, (block, policy) in enumerate(groups)]
...     return HybridOffloadPlanner.build(
...         geometry, hash_block_size=hash_block_size, max_model_len=131072, hybrid_chunk_size=chunk
...     )
>>> def to_load(planner, computed_tokens, boundary_tokens):
...     return {pack.name: list(pack.needed_units(computed_tokens, boundary_tokens)) for pack in planner.packs}

**Full attention** in one group: a prompt of 1,000 tokens stores 3 objects, and one that shares 800 of them loads 3.

>>> full = HitPolicy("full")
>>> planner = plan((16, full), hash_block_size=16, chunk=256)
>>> planner.chunk_count(1000), planner.storable_prefix(800)
(3, 768)
>>> to_load(planner, 0, 768)
{'full-u256': [0, 1, 2]}

**Full attention and sliding windows** (Gemma 3): of the windows only those objects are loaded that the window before
the boundary reaches into; here 511 tokens, 257 to 767. Where the full pack ends early, a shallower boundary is found.

>>> window = HitPolicy("window", window_tokens=512)
>>> planner = plan((16, full), (16, window), (16, window), hash_block_size=16, chunk=256)
>>> to_load(planner, 0, 768)
{'full-u256': [0, 1, 2], 'window-u256-w512': [1, 2]}
>>> planner.usable_prefix({"full-u256": [True, True, False], "window-u256-w512": [True, True, True]}, 0, 800)
512

**A sliding window only**: nothing bounds the depth from below, so a hole in the middle does not matter.

>>> planner = plan((16, HitPolicy("window", window_tokens=256)), hash_block_size=16, chunk=256)
>>> planner.usable_prefix({"window-u256-w256": [False, True, True, False]}, 0, 1024)
768

**Full attention and chunked local attention** (Llama 4): a boundary needs only the attention chunk that it lies in, and
none of it where an attention chunk ends. With chunks as long as the attention chunk nothing of it is ever needed.

>>> local = HitPolicy("chunked", attention_chunk_tokens=8192)
>>> planner = plan((16, full), (16, local), hash_block_size=16, chunk=1024)
>>> to_load(planner, 6144, 10240)
{'full-u1024': [6, 7, 8, 9], 'chunked-u1024-a8192': [8, 9]}
>>> to_load(planner, 6144, 8192)
{'full-u1024': [6, 7], 'chunked-u1024-a8192': []}
>>> planner = plan((16, full), (16, local), hash_block_size=16, chunk=8192)
>>> [pack.name for pack in planner.packs], [group.index for group in planner.groups_without_objects]
(['full-u8192'], [1])

**Mixed block sizes** (DeepSeek-V4, MLA): one object holds 4, 16 and 256 blocks of three groups. The hash that names it
is the engine's 256th, that of the last 4 of its 1,024 tokens.

>>> planner = plan((256, full), (64, full), (4, full), hash_block_size=4, chunk=1024)
>>> [pack] = planner.packs
>>> [len(pack.block_range(group, 0)) for group in pack.groups], pack.hash_index(0)
([4, 16, 256], 255)
>>> planner.group_hash_factors
{0: 256, 1: 256, 2: 256}

**Full attention and recurrent layers** (mamba, GDN): vLLM gives both the same odd block size. A boundary needs one
state, the one that the engine kept exactly there. A chunk size that blocks do not fill works, block by block, with a
warning.

>>> planner = plan((1056, full), (1056, HitPolicy("state")), hash_block_size=1056, chunk=None)
>>> planner.hybrid_chunk_size, to_load(planner, 0, 4224)
(1056, {'full-u1056': [0, 1, 2, 3], 'state-u1056': [3]})
>>> plan((1056, full), hash_block_size=1056, chunk=8192).warnings[0]
'group 0: hybrid_chunk_size 8192 is not a multiple of its block size 1056, so it is stored block by block; \
the nearest good hybrid_chunk_size is 8448'
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from offload_core.api.errors import PlanError
from offload_core.planning.chunk_size import ChunkSizes, unit_tokens
from offload_core.planning.hit_policy import HitPolicy
from offload_core.planning.packs import GroupGeometry, Pack
from offload_core.planning.prefix_search import Search, UnitRange, search

__all__ = ["GroupGeometry", "HitPolicy", "HybridOffloadPlanner", "Pack", "UnitRange"]


@dataclass(frozen=True)
class HybridOffloadPlanner:
    """The plan for one model: packs, boundaries, and what is storable and usable at a token count.

    Build it with :meth:`build`. Everything is derived once; each question afterwards costs O(1) per unit.
    """

    groups: tuple[GroupGeometry, ...]
    packs: tuple[Pack, ...]
    boundary_tokens: int
    """Distance in tokens between boundaries: the least common multiple of all groups' units."""
    hash_block_size: int
    hybrid_chunk_size: int
    max_model_len: int
    scheduler_block_size: int = 1
    warnings: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def build(
        cls,
        groups: Sequence[GroupGeometry],
        *,
        hash_block_size: int,
        max_model_len: int,
        hybrid_chunk_size: int | None = None,
        scheduler_block_size: int = 1,
    ) -> HybridOffloadPlanner:
        """Plan for ``groups``, those that take part in prefix caching (others have no vote and are not stored).

        Args:
            groups: at least one.
            hash_block_size: tokens per engine block hash.
            max_model_len: longest sequence in tokens.
            hybrid_chunk_size: tokens per stored chunk; by default the smallest that fits all groups where one is
                recurrent or has large blocks, else one near 256 tokens.
            scheduler_block_size: the engine goes on only from multiples of this many tokens; more than ``groups`` ask
                for where the engine has other groups too.

        Raises:
            PlanError: nothing could ever be stored or used, with the reason and a working chunk size.
        """
        if not groups:
            raise PlanError("no KV cache group takes part in prefix caching, so there is nothing to offload")
        for group in groups:
            if group.block_size_tokens % hash_block_size:
                raise PlanError(
                    f"group {group.index}: block size {group.block_size_tokens} is not a multiple of the engine's hash "
                    f"block size {hash_block_size}; run the engine with prefix caching enabled so that it aligns them"
                )
        sizes = ChunkSizes(tuple(groups), max_model_len)
        chunk = sizes.smallest if sizes.default is None else sizes.default
        if hybrid_chunk_size is not None:
            if hybrid_chunk_size < 1:
                raise PlanError(
                    f"hybrid_chunk_size is {hybrid_chunk_size}; it must be a positive number of tokens, for example "
                    f"{chunk}"
                )
            chunk = hybrid_chunk_size
        if problem := sizes.problem(chunk):
            raise PlanError(f"{problem}; {sizes.cure(chunk)}")
        boundary = sizes.boundary_tokens(chunk)
        if boundary % scheduler_block_size:
            raise PlanError(
                f"hybrid_chunk_size {chunk} puts boundaries {boundary} tokens apart, but the engine goes on from "
                f"multiples of {scheduler_block_size} tokens only, because of groups that take no part in prefix "
                "caching; "
                f"set hybrid_chunk_size to {math.lcm(boundary, scheduler_block_size)}"
            )
        by_pack: dict[tuple[int, HitPolicy], list[GroupGeometry]] = {}
        for group in groups:
            if not group.policy.needs_nothing_at_multiples_of(boundary):
                by_pack.setdefault((unit_tokens(group, chunk), group.policy), []).append(group)
        packs = tuple(
            Pack(_pack_name(unit, policy), unit, policy, unit // hash_block_size, tuple(members))
            for (unit, policy), members in by_pack.items()
        )
        warnings = (
            () if hybrid_chunk_size is None else tuple(sizes.warnings(chunk))
        )  # nothing does better than our choice
        return cls(
            tuple(groups), packs, boundary, hash_block_size, chunk, max_model_len, scheduler_block_size, warnings
        )

    @cached_property
    def groups_without_objects(self) -> tuple[GroupGeometry, ...]:
        """The groups of which no boundary needs anything: nothing is stored of them, and they have no vote.

        They are chunked local attention where an attention chunk ends at every boundary, and windows of one token.
        """
        packed = {group.index for pack in self.packs for group in pack.groups}
        return tuple(group for group in self.groups if group.index not in packed)

    @cached_property
    def group_hash_factors(self) -> dict[int, int]:
        """Hash blocks per unit, by group index."""
        return {group.index: self._unit_tokens(group) // self.hash_block_size for group in self.groups}

    @cached_property
    def first_hashable_chunk_idx(self) -> int:
        """Index of the first chunk of ``hybrid_chunk_size`` tokens at whose end every group has a whole unit."""
        return -(-max(map(self._unit_tokens, self.groups)) // self.hybrid_chunk_size) - 1

    def chunk_count(self, tokens: int) -> int:
        """Return how many whole chunks ``tokens`` tokens hold, a chunk being what lies between two boundaries.

        That is ``hybrid_chunk_size`` tokens where the blocks of every group fill it.
        """
        return tokens // self.boundary_tokens

    def covered_tokens(self, chunks: int) -> int:
        """Return how many tokens the first ``chunks`` chunks hold; the inverse of :meth:`chunk_count`."""
        return chunks * self.boundary_tokens

    def storable_prefix(self, tokens: int) -> int:
        """Return the deepest boundary at or below ``tokens``."""
        return tokens - tokens % self.boundary_tokens

    def ever_needed(self, pack: Pack, unit: int) -> bool:
        """Return whether some boundary needs ``unit``; an object that none needs would be stored and never read."""
        first_boundary = self.storable_prefix(pack.tokens_in(unit + 1) + self.boundary_tokens - 1)
        return unit in pack.needed_units(0, first_boundary)

    def search(self, computed_tokens: int, limit_tokens: int) -> Search:
        """Search for the deepest boundary at which every pack is satisfied (invariant I6).

        A generator: it yields a tuple of :class:`UnitRange`, wants to be sent one sequence of flags for each, and
        returns a boundary in ``(computed_tokens, limit_tokens]``, or ``computed_tokens`` when none is usable. Where no
        boundary lies in that range it asks nothing.

        Args:
            computed_tokens: prefix that the engine already holds locally.
            limit_tokens: the deepest prefix that may be used: at most the token count minus one, because the last token
                is always computed, and at most what the engine has hashed.
        """
        return search(self.packs, self.boundary_tokens, computed_tokens, limit_tokens)

    def usable_prefix(self, present: Mapping[str, Sequence[bool]], computed_tokens: int, limit_tokens: int) -> int:
        """Return what :meth:`search` finds where it is known beforehand what is there.

        Args:
            present: per pack name, whether each unit's object is there, starting at the unit that contains
                ``computed_tokens``; units past the end of a sequence count as absent.
            computed_tokens: see :meth:`search`.
            limit_tokens: see :meth:`search`.
        """
        searching = self.search(computed_tokens, limit_tokens)
        try:
            asked = next(searching)
            while True:
                asked = searching.send([_flags(present, question, computed_tokens) for question in asked])
        except StopIteration as found:
            boundary: int = found.value
            return boundary

    def _unit_tokens(self, group: GroupGeometry) -> int:
        return unit_tokens(group, self.hybrid_chunk_size)


def _flags(present: Mapping[str, Sequence[bool]], question: UnitRange, computed_tokens: int) -> list[bool]:
    known = present.get(question.pack.name, ())
    first = question.pack.units_in(computed_tokens)
    return [unit - first < len(known) and known[unit - first] for unit in question.units]


def _pack_name(unit: int, policy: HitPolicy) -> str:
    suffix = {"window": f"-w{policy.window_tokens}", "chunked": f"-a{policy.attention_chunk_tokens}"}
    return f"{policy.kind}-u{unit}{suffix.get(policy.kind, '')}"
