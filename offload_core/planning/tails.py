"""Tails: the blocks between the last boundary of a prompt and its end, for hits that end inside a chunk.

A prompt of 900 tokens with chunks of 256 has its last boundary at 768. Its tail holds the blocks behind that boundary,
up to token 896: the last one that the engine can resume from and that ends a hashed block. So the same prompt, or one
that goes on from there, is served 896 tokens. Only the end of a prompt has a tail.

Each pack has a pack of tails beside it, with names and objects of its own. A *unit* of that pack is a possible end of a
tail. The hash of the tokens up to the end names the object, so it names the number of filled tokens too.

The last block of a tail may be filled in part only. The engine computes all tokens behind the end before it reads them.

>>> full = GroupGeometry(0, 128, HitPolicy("full"))
>>> chunks = Pack("full-u256", 256, full.policy, 16, (full,))
>>> tails = TailPack.of(chunks, tail_tokens=16)
>>> tails.name, tails.needed_units(0, 896), tails.needed_units(0, 768)
('full-u256-tail', range(55, 56), range(0, 0))
>>> tails.tokens_in(56), tails.block_range(full, 55)
(896, range(6, 7))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload_core.planning.hit_policy import HitPolicy
from offload_core.planning.packs import GroupGeometry, Pack
from offload_core.planning.prefix_search import PrefixDepth, Search, UnitRange

__all__ = ["GroupGeometry", "HitPolicy", "TailPack", "no_tails_warning", "search_tails", "tails_problem"]


@dataclass(frozen=True)
class TailPack(Pack):
    """The tails of one pack: one object per end of a tail. ``unit_tokens`` is the distance between possible ends."""

    chunk_tokens: int = 0
    """Tokens of a unit of the pack itself."""

    @classmethod
    def of(cls, pack: Pack, tail_tokens: int) -> TailPack:
        """Return the tails of ``pack``.

        Args:
            tail_tokens: distance between possible ends, a multiple of the engine's hash block.
        """
        hash_block_size = pack.unit_tokens // pack.hash_factor
        return cls(
            f"{pack.name}-tail",
            tail_tokens,
            pack.policy,
            tail_tokens // hash_block_size,
            pack.groups,
            pack.lookahead_blocks,
            pack.unit_tokens,
        )

    def stored_blocks(self, group: GroupGeometry) -> int:
        """Return the largest number of blocks of ``group`` in an object. All objects of a pack have one size.

        A window that does not begin with a block overlaps one block more.
        """
        blocks = self.chunk_tokens // group.block_size_tokens
        if self.policy.kind == "state":
            return 1
        if self.policy.kind == "window":
            return min(blocks, -(-(self.policy.window_tokens - 1) // group.block_size_tokens) + 1)
        return blocks

    def block_range(self, group: GroupGeometry, unit: int) -> range:
        """Return the positions in ``group``'s block table of the blocks in the object of an end.

        Its first payload slots hold them. There may be fewer of them than slots.
        """
        end = self.tokens_in(unit + 1)
        stop = -(-end // group.block_size_tokens)
        if self.policy.kind == "state":
            return range(stop - 1, stop)
        first = max(end - end % self.chunk_tokens, self.policy.first_needed_token(end))
        return range(first // group.block_size_tokens, stop)

    def needed_units(self, computed_tokens: int, boundary_tokens: int) -> range:
        """Return the object to load to extend a prefix to ``boundary_tokens``; none if it ends at a boundary."""
        inside = boundary_tokens % self.chunk_tokens != 0
        first = max(computed_tokens, self.policy.first_needed_token(boundary_tokens))
        if not inside or first >= boundary_tokens:
            return range(0)
        return range(boundary_tokens // self.unit_tokens - 1, boundary_tokens // self.unit_tokens)


def tails_problem(
    groups: Sequence[GroupGeometry], packs: Sequence[Pack], boundary_tokens: int, tail_tokens: int
) -> str | None:
    """Return the reason why prompts have no tails, or ``None`` if they have."""
    if boundary_tokens % tail_tokens:
        return f"boundaries are {boundary_tokens} tokens apart, which is no multiple of {tail_tokens}"
    if any(pack.unit_tokens != boundary_tokens for pack in packs):
        return f"some groups are stored in units other than the {boundary_tokens} tokens between boundaries"
    packed = {group.index for pack in packs for group in pack.groups}
    for group in groups:
        if group.index not in packed and group.policy.kind == "chunked":
            return f"group {group.index} has no objects, because an attention chunk ends at every boundary"
    return None


def no_tails_warning(problem: str) -> str:
    """Return the warning for an operator who asked for finer hits and gets none from the tiers."""
    return f"prefix_match_unit is set, but the tiers serve no prompt beyond its last whole chunk: {problem}"


def search_tails(
    packs: Sequence[Pack],
    tail_packs: Sequence[TailPack],
    boundary_tokens: int,
    computed_tokens: int,
    limit_tokens: int,
    found: PrefixDepth,
) -> Search:
    """Search for the deepest tail behind the depth of full attention that a search has found.

    The first question is about all ends within that chunk, for one pack only. The others are about one end each.
    It is a generator like :func:`offload_core.planning.prefix_search.search`, and returns ``found`` if there is none.
    """
    tail_tokens = tail_packs[0].unit_tokens
    begin = found.attention_tokens
    last = min(limit_tokens, begin - begin % boundary_tokens + boundary_tokens - 1)
    ends = range(begin // tail_tokens, last // tail_tokens)
    if not ends:
        return found
    first = next((pack for pack in tail_packs if pack.policy.kind == "state"), tail_packs[0])  # states are the rarest
    others = [pack for pack in (*tail_packs, *packs) if pack is not first and pack.policy.kind != "full"]
    others += (pack for pack in tail_packs if pack is not first and pack.policy.kind == "full")
    (flags,) = yield (UnitRange(first, ends),)
    for unit in reversed(ends):
        end = (unit + 1) * tail_tokens
        if flags[unit - ends.start] or not first.needed_units(computed_tokens, end):
            rest = tuple(
                UnitRange(pack, units) for pack in others if (units := pack.needed_units(computed_tokens, end))
            )
            if not rest or all(map(all, (yield rest))):
                return PrefixDepth(end, found.attention_tokens)
    return found
