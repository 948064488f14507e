"""The plan for one model: the tokens that make an object and the objects that make a hit. Integer arithmetic only.

Words used here and everywhere in offload-core:

* *group*: layers that share one block table in the engine, with one block size and one hit policy.
* *unit*: the run of tokens whose blocks of one group go into one object. It is ``hybrid_chunk_size`` tokens if whole
  blocks fill them, else one block.
* *pack*: the groups that have the same unit and the same hit policy. They are stored as one object per unit.
* *boundary*: a token count at which every group's units end. A loaded prefix ends at a boundary.

The planner does not split the pages of a block larger than the chunk on the token axis. Splitting would add objects
but no hits, because vLLM accepts external prefixes only at whole blocks of every group.

There is one example per kind of model. Each begins with its groups: index, block size, hit policy.

>>> def plan(*groups, hash_block_size, chunk):
...     geometry = [GroupGeometry(index, block, policy) for index, (block, policy) in enumerate(groups)]
...     return HybridOffloadPlanner.build(
...         geometry, hash_block_size=hash_block_size, max_model_len=131072, hybrid_chunk_size=chunk
...     )
>>> def to_load(planner, computed_tokens, boundary_tokens):
...     return {pack.name: list(pack.needed_units(computed_tokens, boundary_tokens)) for pack in planner.packs}

**Full attention** in one group: a prompt of 1,000 tokens stores 3 objects. A prompt that shares 800 of them loads 3.

>>> full = HitPolicy("full")
>>> planner = plan((16, full), hash_block_size=16, chunk=256)
>>> planner.chunk_count(1000), planner.storable_prefix(800)
(3, 768)
>>> to_load(planner, 0, 768)
{'full-u256': [0, 1, 2]}

**Full attention and sliding windows** (Gemma 3): a window group loads only the objects that overlap the window before
the boundary. Here the window has 511 tokens, 257 to 767. If an object of the full pack is missing, the search finds a
shallower boundary.

>>> window = HitPolicy("window", window_tokens=512)
>>> planner = plan((16, full), (16, window), (16, window), hash_block_size=16, chunk=256)
>>> to_load(planner, 0, 768)
{'full-u256': [0, 1, 2], 'window-u256-w512': [1, 2]}
>>> planner.usable_prefix({"full-u256": [True, True, False], "window-u256-w512": [True, True, True]}, 0, 800)
512

**A sliding window only**: no group needs the first objects, so a missing one does not matter.

>>> planner = plan((16, HitPolicy("window", window_tokens=256)), hash_block_size=16, chunk=256)
>>> planner.usable_prefix({"window-u256-w256": [False, True, True, False]}, 0, 1024)
768

**Full attention and chunked local attention** (Llama 4): a boundary needs the tokens of its own attention chunk only.
A boundary at the end of an attention chunk needs none. If chunks are as long as the attention chunk, the local group
never needs an object.

>>> local = HitPolicy("chunked", attention_chunk_tokens=8192)
>>> planner = plan((16, full), (16, local), hash_block_size=16, chunk=1024)
>>> to_load(planner, 6144, 10240)
{'full-u1024': [6, 7, 8, 9], 'chunked-u1024-a8192': [8, 9]}
>>> to_load(planner, 6144, 8192)
{'full-u1024': [6, 7], 'chunked-u1024-a8192': []}
>>> planner = plan((16, full), (16, local), hash_block_size=16, chunk=8192)
>>> [pack.name for pack in planner.packs], [group.index for group in planner.groups_without_objects]
(['full-u8192'], [1])

**Mixed block sizes** (DeepSeek-V4, MLA): one object holds 4, 16 and 256 blocks of three groups. Its name is the
engine's 256th block hash, the hash of the last 4 of its 1,024 tokens.

>>> planner = plan((256, full), (64, full), (4, full), hash_block_size=4, chunk=1024)
>>> [pack] = planner.packs
>>> [len(pack.block_range(group, 0)) for group in pack.groups], pack.hash_index(0)
([4, 16, 256], 255)
>>> planner.group_hash_factors
{0: 256, 1: 256, 2: 256}

**Full attention and recurrent layers** (mamba, GDN): vLLM gives both groups the same unusual block size. A boundary
needs one state: the state that the engine kept exactly there. A chunk size that whole blocks do not fill still works,
block by block, with a warning. If a pack lacks a group of its policy because of another unit, its name tells its
groups: bit 1 for group 1, and so on.

>>> planner = plan((1056, full), (1056, HitPolicy("state")), hash_block_size=1056, chunk=None)
>>> planner.hybrid_chunk_size, to_load(planner, 0, 4224)
(1056, {'full-u1056': [0, 1, 2, 3], 'state-u1056': [3]})
>>> plan((1056, full), hash_block_size=1056, chunk=8192).warnings[0]
'group 0: hybrid_chunk_size 8192 is not a multiple of its block size 1056, so it is stored block by block; \
the nearest good hybrid_chunk_size is 8448'
>>> [pack.name for pack in plan((256, full), (64, full), hash_block_size=64, chunk=128).packs]
['full-u256-g1', 'full-u128-g2']

**Drafts that read ahead** (EAGLE, MTP): the draft layers' entry at a position depends on the next token too. So a unit
of attention is named by the hash of the block behind it. A prompt can resume at a boundary if it has that block.

>>> geometry = [GroupGeometry(0, 16, full)]
>>> planner = HybridOffloadPlanner.build(
...     geometry, hash_block_size=16, max_model_len=4096, hybrid_chunk_size=16, lookahead_tokens=1
... )
>>> planner.packs[0].hash_index(0), planner.replay_boundary(64), planner.replay_boundary(63)
(1, 48, 32)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from offload_core.api.errors import PlanError
from offload_core.planning.chunk_keys import ChunkHashes
from offload_core.planning.chunk_size import ChunkSizes, unit_tokens
from offload_core.planning.hit_policy import HitPolicy
from offload_core.planning.packs import GroupGeometry, Pack
from offload_core.planning.prefix_search import FIRST_BATCH_UNITS, PrefixDepth, Search, UnitRange, search
from offload_core.planning.tails import TailPack, no_tails_warning, search_tails, tails_problem

__all__ = ["GroupGeometry", "HitPolicy", "HybridOffloadPlanner", "Pack", "PrefixDepth", "UnitRange"]


@dataclass(frozen=True)
class HybridOffloadPlanner:
    """The plan for one model: its packs, its boundaries, and the storable and the usable prefix of a token count.

    Build it with :meth:`build`, which derives all values once. Each later question costs O(1) per unit.
    """

    groups: tuple[GroupGeometry, ...]
    packs: tuple[Pack, ...]
    boundary_tokens: int
    """Distance in tokens between boundaries: the least common multiple of all groups' units."""
    hash_block_size: int
    hybrid_chunk_size: int
    max_model_len: int
    scheduler_block_size: int = 1
    lookahead_blocks: int = 0
    """Hash blocks behind a boundary that a prompt must have to resume there, because a draft's cache reads ahead."""
    warnings: tuple[str, ...] = field(default=(), compare=False)
    tail_packs: tuple[TailPack, ...] = ()
    """Beside each pack, its tails (:mod:`.tails`); empty if prompts have none."""

    @classmethod
    def build(
        cls,
        groups: Sequence[GroupGeometry],
        *,
        hash_block_size: int,
        max_model_len: int,
        hybrid_chunk_size: int | None = None,
        scheduler_block_size: int = 1,
        lookahead_tokens: int = 0,
        tail_tokens: int | None = None,
    ) -> HybridOffloadPlanner:
        """Plan for ``groups``, the groups that take part in prefix caching. Other groups have no vote and no objects.

        Args:
            groups: at least one.
            hash_block_size: tokens per engine block hash.
            max_model_len: longest sequence in tokens.
            hybrid_chunk_size: tokens per stored chunk. The default is near 256 tokens. If a group is recurrent or has
                large blocks, the default is the smallest size that fits all groups.
            scheduler_block_size: the engine continues a prefix only at multiples of this many tokens. This can exceed
                the needs of ``groups``, if the engine has other groups too.
            lookahead_tokens: the cache at a position depends on this many further tokens.
            tail_tokens: let prompts have tails (:mod:`.tails`) that end at multiples of this many tokens, which is a
                multiple of ``hash_block_size``. If the groups do not permit it, a warning says why.

        Raises:
            PlanError: no object could ever be stored or used; the message has the reason and a working chunk size.
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
                f"hybrid_chunk_size {chunk} puts boundaries {boundary} tokens apart, but the engine continues only at "
                f"multiples of {scheduler_block_size} tokens, because of groups that take no part in prefix caching; "
                f"set hybrid_chunk_size to {math.lcm(boundary, scheduler_block_size)}"
            )
        by_pack: dict[tuple[int, HitPolicy], list[GroupGeometry]] = {}
        for group in groups:
            if not group.policy.needs_nothing_at_multiples_of(boundary):
                by_pack.setdefault((unit_tokens(group, chunk), group.policy), []).append(group)
        lookahead = -(-lookahead_tokens // hash_block_size)
        packs = tuple(
            Pack(
                _pack_name(unit, policy, members, groups),
                unit,
                policy,
                unit // hash_block_size,
                tuple(members),
                lookahead,
            )
            for (unit, policy), members in by_pack.items()
        )
        warnings = () if hybrid_chunk_size is None else tuple(sizes.warnings(chunk))  # the default has no drawbacks
        tail_packs: tuple[TailPack, ...] = ()
        if tail_tokens is not None and tail_tokens != boundary:
            if problem := tails_problem(groups, packs, boundary, tail_tokens):
                warnings += (no_tails_warning(problem),)
            else:
                tail_packs = tuple(TailPack.of(pack, tail_tokens) for pack in packs)
        return cls(
            tuple(groups),
            packs,
            boundary,
            hash_block_size,
            chunk,
            max_model_len,
            scheduler_block_size,
            lookahead,
            warnings,
            tail_packs,
        )

    @cached_property
    def all_packs(self) -> tuple[Pack, ...]:
        """The packs, and those of their tails."""
        return (*self.packs, *self.tail_packs)

    @cached_property
    def groups_without_objects(self) -> tuple[GroupGeometry, ...]:
        """The groups that no boundary needs: they have no objects and no vote.

        They are windows of one token, and chunked local attention if an attention chunk ends at every boundary.
        """
        packed = {group.index for pack in self.packs for group in pack.groups}
        return tuple(group for group in self.groups if group.index not in packed)

    @cached_property
    def group_hash_factors(self) -> dict[int, int]:
        """Hash blocks per unit, by group index."""
        return {group.index: self._unit_tokens(group) // self.hash_block_size for group in self.groups}

    @cached_property
    def first_hashable_chunk_idx(self) -> int:
        """Index of the first chunk of ``hybrid_chunk_size`` tokens that ends after a whole unit of every group."""
        return -(-max(map(self._unit_tokens, self.groups)) // self.hybrid_chunk_size) - 1

    def chunk_count(self, tokens: int) -> int:
        """Return the number of whole chunks in ``tokens`` tokens. A chunk extends from one boundary to the next.

        It has ``hybrid_chunk_size`` tokens if whole blocks of every group fill them.
        """
        return tokens // self.boundary_tokens

    def covered_tokens(self, chunks: int) -> int:
        """Return the number of tokens in the first ``chunks`` chunks; the inverse of :meth:`chunk_count`."""
        return chunks * self.boundary_tokens

    def storable_prefix(self, tokens: int) -> int:
        """Return the deepest boundary at or below ``tokens``."""
        return tokens - tokens % self.boundary_tokens

    def named_tokens(self, hash_blocks: int) -> int:
        """Return the number of tokens whose units have names after ``hash_blocks`` hash blocks."""
        return max(0, hash_blocks - self.lookahead_blocks) * self.hash_block_size

    def replay_boundary(self, prompt_tokens: int) -> int:
        """Return the deepest boundary from which the same prompt can resume; its last token is always computed."""
        named = self.named_tokens(prompt_tokens // self.hash_block_size)
        return self.storable_prefix(max(0, min(prompt_tokens - 1, named)))

    def reachable_prefix(self, tokens: int) -> int:
        """Return the deepest end of a loaded prefix at or below ``tokens``: a boundary, or the end of a tail."""
        return tokens - tokens % (self.tail_packs[0].unit_tokens if self.tail_packs else self.boundary_tokens)

    def tail_end(self, prompt_tokens: int) -> int:
        """Return the end of a prompt's tail in tokens; 0 if the prompt has none, or ends at a boundary."""
        named = self.named_tokens(prompt_tokens // self.hash_block_size)
        end = self.reachable_prefix(max(0, min(prompt_tokens - 1, named)))
        return end if end % self.boundary_tokens else 0

    def chunk_hashes(self, block_hashes: Sequence[bytes]) -> dict[str, ChunkHashes]:
        """Return, per pack, tails included, the hashes that name the units of a sequence."""
        return {
            pack.name: ChunkHashes(block_hashes, pack.hash_factor, pack.lookahead_blocks) for pack in self.all_packs
        }

    def ever_needed(self, pack: Pack, unit: int) -> bool:
        """Return ``True`` if some boundary needs ``unit``. An object that no boundary needs would never be read."""
        first_boundary = self.storable_prefix(pack.tokens_in(unit + 1) + self.boundary_tokens - 1)
        return unit in pack.needed_units(0, first_boundary)

    def search(
        self,
        computed_tokens: int,
        limit_tokens: int,
        first_batch_units: int = FIRST_BATCH_UNITS,
        local_attention_tokens: int = 0,
        tail_limit_tokens: int | None = None,
    ) -> Search:
        """Search for the deepest boundary at which every pack is satisfied (invariant I6).

        The search is a generator. It yields a tuple of :class:`UnitRange`; send it one sequence of flags for each. It
        returns a :class:`PrefixDepth`: boundaries in ``(computed_tokens, limit_tokens]``, or ``computed_tokens`` where
        none will do. It asks nothing if no boundary lies in that range.

        Args:
            computed_tokens: length of the prefix that the engine already holds locally.
            limit_tokens: length of the deepest prefix that may be used. It is at most the token count minus one,
                because the last token is always computed. It does not exceed the tokens that the engine has hashed.
            first_batch_units: units of each pack in the first question, unless a boundary needs more.
            local_attention_tokens: length of the prefix whose full attention the engine holds locally. It is more than
                ``computed_tokens`` if the engine has evicted windows or states. Boundaries up to this length need only
                the last unit of full attention before them.
            tail_limit_tokens: deepest end of a tail, by default ``limit_tokens``.
        """
        found = yield from search(
            self.packs, self.boundary_tokens, computed_tokens, limit_tokens, first_batch_units, local_attention_tokens
        )
        if self.tail_packs and local_attention_tokens <= computed_tokens:
            limit = limit_tokens if tail_limit_tokens is None else tail_limit_tokens
            found = yield from search_tails(
                self.packs, self.tail_packs, self.boundary_tokens, computed_tokens, limit, found
            )
        return found

    def usable_prefix(self, present: Mapping[str, Sequence[bool]], computed_tokens: int, limit_tokens: int) -> int:
        """Return the usable boundary that :meth:`search` finds if the presence of objects is known beforehand.

        Args:
            present: per pack name, one flag for each unit's object, from the unit that contains ``computed_tokens`` on.
                Units past the end of a sequence count as absent.
            computed_tokens: see :meth:`search`.
            limit_tokens: see :meth:`search`.
        """
        searching = self.search(computed_tokens, limit_tokens)
        try:
            asked = next(searching)
            while True:
                asked = searching.send([_flags(present, question, computed_tokens) for question in asked])
        except StopIteration as found:
            depth: PrefixDepth = found.value
            return depth.usable_tokens

    def _unit_tokens(self, group: GroupGeometry) -> int:
        return unit_tokens(group, self.hybrid_chunk_size)


def _flags(present: Mapping[str, Sequence[bool]], question: UnitRange, computed_tokens: int) -> list[bool]:
    flags = present.get(question.pack.name, ())
    first = question.pack.units_in(computed_tokens)
    return [unit - first < len(flags) and flags[unit - first] for unit in question.units]


def _pack_name(unit: int, policy: HitPolicy, members: Sequence[GroupGeometry], groups: Sequence[GroupGeometry]) -> str:
    """Return the name of a pack. With another chunk size, a pack of the same name has the same groups.

    Usually all groups of a policy have one unit. Otherwise the name ends in the set of the members' indices, as a
    hexadecimal number with one bit per group.
    """
    suffix = {"window": f"-w{policy.window_tokens}", "chunked": f"-a{policy.attention_chunk_tokens}"}
    name = f"{policy.kind}-u{unit}{suffix.get(policy.kind, '')}"
    if len(members) == sum(group.policy == policy for group in groups):
        return name
    return f"{name}-g{sum(1 << group.index for group in members):x}"
