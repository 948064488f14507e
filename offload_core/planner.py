"""Which tokens make an object, which objects make a hit: integer arithmetic, nothing else.

Words used here and everywhere in offload-core:

* *group*: layers that share one block table in the engine, with one block size and one hit policy.
* *unit*: the run of tokens whose blocks of one group go into one object.
* *pack*: the groups that have the same unit and the same hit policy; they are stored as one object per unit.
* *boundary*: a token count at which every pack's units end; a loaded prefix ends at a boundary.

Example, one full-attention and one sliding-window group (window 512) with blocks of 16, ``hybrid_chunk_size`` 256:
both have units of 256 tokens, so a prompt of 1,000 tokens stores 3 objects per pack. A later prompt that shares 800
tokens can use the boundary 768: the full pack's units 0 to 2, and the window pack's units 1 and 2 (tokens 257 to 767).

Recurrent groups need one state exactly at the boundary, so a unit of a recurrent pack holds that one state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from offload_core.errors import PlanError

_DEFAULT_CHUNK_TOKENS = 256


@dataclass(frozen=True)
class HitPolicy:
    """What a group must hold for a prefix of ``t`` tokens to be usable.

    ``full``: every token below ``t``. ``window``: the last ``window_tokens - 1`` tokens below ``t`` (a query attends
    to itself and the ``window_tokens - 1`` tokens before it). ``state``: one recurrent state after exactly ``t``
    tokens.
    """

    kind: Literal["full", "window", "state"]
    window_tokens: int = 0

    def first_needed_token(self, boundary_tokens: int) -> int:
        """Return the first token position whose cache is needed to go on from ``boundary_tokens``."""
        if self.kind == "full":
            return 0
        if self.kind == "window":
            return max(0, boundary_tokens - self.window_tokens + 1)
        return max(0, boundary_tokens - 1)

    def __str__(self) -> str:
        return f"window of {self.window_tokens} tokens" if self.kind == "window" else self.kind


@dataclass(frozen=True)
class GroupGeometry:
    """One KV cache group as the engine describes it.

    Args:
        index: the group's position in the engine's list of groups.
        block_size_tokens: tokens per block.
        policy: what a hit needs of this group.
    """

    index: int
    block_size_tokens: int
    policy: HitPolicy


@dataclass(frozen=True)
class Pack:
    """Groups stored together: one object per unit of ``unit_tokens`` tokens."""

    name: str
    unit_tokens: int
    policy: HitPolicy
    hash_factor: int
    """Hash blocks per unit: ``unit_tokens / hash_block_size``."""
    groups: tuple[GroupGeometry, ...]

    def hash_index(self, unit: int) -> int:
        """Return which of the engine's block hashes names ``unit``: the one at the unit's last hash block."""
        return (unit + 1) * self.hash_factor - 1

    def stored_blocks(self, group: GroupGeometry) -> int:
        """Return how many trailing blocks of ``group`` one unit's object holds.

        A window shorter than the unit needs only the unit's tail, and the engine may have freed the rest by the time
        the unit is complete. A recurrent group has one block per boundary.
        """
        blocks_per_unit = self.unit_tokens // group.block_size_tokens
        if self.policy.kind == "state":
            return 1
        if self.policy.kind == "window":
            return min(blocks_per_unit, max(1, -(-(self.policy.window_tokens - 1) // group.block_size_tokens)))
        return blocks_per_unit

    def block_range(self, group: GroupGeometry, unit: int) -> range:
        """Return the positions in ``group``'s block table that ``unit``'s object holds."""
        end = (unit + 1) * self.unit_tokens // group.block_size_tokens
        return range(end - self.stored_blocks(group), end)

    def needed_units(self, computed_tokens: int, boundary_tokens: int) -> range:
        """Return the units to load so that a prefix of ``computed_tokens`` becomes one of ``boundary_tokens``."""
        first = max(computed_tokens, self.policy.first_needed_token(boundary_tokens))
        if first >= boundary_tokens:
            return range(0)
        return range(first // self.unit_tokens, boundary_tokens // self.unit_tokens)


@dataclass(frozen=True)
class HybridOffloadPlanner:
    """The plan for one model: packs, boundaries, and what is storable and usable at a token count.

    Build it with :meth:`build`. Everything is derived once; each question afterwards costs O(1) per unit.
    """

    packs: tuple[Pack, ...]
    hash_block_size: int
    hybrid_chunk_size: int
    max_model_len: int
    warnings: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def build(
        cls,
        groups: Sequence[GroupGeometry],
        *,
        hash_block_size: int,
        max_model_len: int,
        hybrid_chunk_size: int | None = None,
    ) -> HybridOffloadPlanner:
        """Plan for ``groups``, those that take part in prefix caching (others have no vote and are not stored).

        Args:
            groups: at least one.
            hash_block_size: tokens per engine block hash.
            max_model_len: longest sequence in tokens.
            hybrid_chunk_size: tokens per stored chunk; by default the largest block size, or a multiple of all block
                sizes near 256 tokens where blocks are smaller and no group is recurrent.

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
        common = math.lcm(*(group.block_size_tokens for group in groups))
        good = _good_chunk_size(groups, common, max_model_len)
        chunk = hybrid_chunk_size if hybrid_chunk_size is not None else good
        if chunk < 1:
            raise PlanError(f"hybrid_chunk_size is {chunk}; it must be a positive number of tokens, for example {good}")
        nearest = _nearest_multiple(chunk, common, max_model_len)
        warnings: list[str] = []
        by_pack: dict[tuple[int, HitPolicy], list[GroupGeometry]] = {}
        for group in groups:
            unit = _unit_tokens(group, chunk, good, nearest, warnings)
            by_pack.setdefault((unit, group.policy), []).append(group)
        packs = tuple(
            Pack(_pack_name(unit, policy), unit, policy, unit // hash_block_size, tuple(members))
            for (unit, policy), members in by_pack.items()
        )
        planner = cls(packs, hash_block_size, chunk, max_model_len, tuple(warnings))
        if planner.boundary_tokens >= max_model_len:
            units = ", ".join(f"{pack.name}: {pack.unit_tokens}" for pack in packs)
            cure = (
                f"set hybrid_chunk_size to {good}"
                if common < max_model_len
                else "raise max_model_len or choose smaller blocks"
            )
            raise PlanError(
                f"hybrid_chunk_size {chunk} gives the first boundary at {planner.boundary_tokens} tokens "
                f"(units {units}), but max_model_len is {max_model_len} and the last token is always computed, "
                f"so nothing could ever be loaded; {cure}"
            )
        return planner

    @cached_property
    def boundary_tokens(self) -> int:
        """Distance in tokens between boundaries: the least common multiple of all units."""
        return math.lcm(*(pack.unit_tokens for pack in self.packs))

    def storable_units(self, pack: Pack, tokens: int) -> int:
        """Return how many leading units of ``pack`` are complete after ``tokens`` tokens."""
        return tokens // pack.unit_tokens

    def usable_prefix(self, present: Mapping[str, Sequence[bool]], computed_tokens: int, limit_tokens: int) -> int:
        """Return the deepest boundary at which every pack is satisfied (invariant I6).

        Args:
            present: per pack name, whether each unit's object is there, starting at the unit that contains
                ``computed_tokens``; units past the end of a sequence count as absent.
            computed_tokens: prefix the engine already holds locally.
            limit_tokens: the deepest prefix that may be used; callers pass the token count minus one, because the
                last token is always computed.

        Returns:
            A boundary in ``(computed_tokens, limit_tokens]``, or ``computed_tokens`` when no deeper one is usable.
        """
        deepest = limit_tokens
        run_lengths: list[tuple[Pack, list[int]]] = []
        for pack in self.packs:
            flags = present.get(pack.name, ())
            if pack.policy.kind == "full":
                missing = next((i for i, flag in enumerate(flags) if not flag), len(flags))
                deepest = min(deepest, (computed_tokens // pack.unit_tokens + missing) * pack.unit_tokens)
            else:
                run_lengths.append((pack, _run_lengths(flags)))
        step = self.boundary_tokens
        for boundary in range(deepest // step * step, computed_tokens, -step):
            if all(_satisfied(pack, runs, computed_tokens, boundary) for pack, runs in run_lengths):
                return boundary
        return computed_tokens


def _satisfied(pack: Pack, runs: Sequence[int], computed_tokens: int, boundary_tokens: int) -> bool:
    needed = pack.needed_units(computed_tokens, boundary_tokens)
    if not needed:
        return True
    last = needed[-1] - computed_tokens // pack.unit_tokens
    return last < len(runs) and runs[last] >= len(needed)


def _run_lengths(flags: Sequence[bool]) -> list[int]:
    """Return, for each position, how many consecutive ``True`` end there."""
    runs: list[int] = []
    run = 0
    for flag in flags:
        run = run + 1 if flag else 0
        runs.append(run)
    return runs


def _good_chunk_size(groups: Sequence[GroupGeometry], common: int, max_model_len: int) -> int:
    """Return a chunk size that fits every group and leaves at least one boundary below ``max_model_len``."""
    if any(group.policy.kind == "state" for group in groups) or common >= _DEFAULT_CHUNK_TOKENS:
        return common
    wanted = -(-_DEFAULT_CHUNK_TOKENS // common) * common
    return wanted if wanted < max_model_len else common


def _unit_tokens(group: GroupGeometry, chunk: int, good: int, nearest: int, warnings: list[str]) -> int:
    block = group.block_size_tokens
    if block >= chunk:
        return block
    if chunk % block:
        warnings.append(
            f"group {group.index}: hybrid_chunk_size {chunk} is not a multiple of its block size {block}, so it is "
            f"stored block by block; the nearest good hybrid_chunk_size is {nearest}"
        )
        return block
    if group.policy.kind == "state" and good % chunk:  # a chunk that divides it moves no boundary
        warnings.append(
            f"group {group.index} is recurrent: the engine hands over its states at multiples of {block} tokens, and "
            f"with hybrid_chunk_size {chunk} only those at multiples of {chunk} are stored; hybrid_chunk_size {good} "
            "uses every one that the other groups can follow"
        )
    return chunk


def _nearest_multiple(value: int, step: int, limit: int) -> int:
    """Return the positive multiple of ``step`` nearest to ``value``, below ``limit`` if there is one."""
    return max(step, min((value + step // 2) // step, (limit - 1) // step) * step)


def _pack_name(unit: int, policy: HitPolicy) -> str:
    suffix = f"-w{policy.window_tokens}" if policy.kind == "window" else ""
    return f"{policy.kind}-u{unit}{suffix}"
