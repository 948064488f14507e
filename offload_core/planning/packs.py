"""The engine's KV cache groups and their packs. Each pack stores one object per unit of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload_core.planning.hit_policy import HitPolicy


@dataclass(frozen=True)
class GroupGeometry:
    """One KV cache group as the engine describes it.

    Args:
        index: the group's position in the engine's list of groups.
        block_size_tokens: tokens per block.
        policy: the tokens of this group that a hit needs.
    """

    index: int
    block_size_tokens: int
    policy: HitPolicy

    def block_slice(self, reference_block_tokens: int, start: int, stop: int) -> range:
        """Return the block-table positions of this group's blocks that end in reference blocks ``[start, stop)``.

        If this group's blocks are a multiple of the reference block, the indices are divided by the ratio. If they are
        a fraction of it, the indices are multiplied. A block belongs to the slice in which it ends. A slice therefore
        never holds a block that is incomplete at ``stop``, and consecutive slices hold every whole block exactly once.
        """
        return range(
            start * reference_block_tokens // self.block_size_tokens,
            stop * reference_block_tokens // self.block_size_tokens,
        )


def usable_reference_blocks(
    groups: Sequence[GroupGeometry], num_blocks: Sequence[int], reference_block_tokens: int
) -> int:
    """Return the number of leading reference blocks that are whole in every group.

    Args:
        groups: all groups of a request. Without groups the result is zero.
        num_blocks: the number of blocks of each of ``groups``. A group without blocks makes the result zero.
        reference_block_tokens: tokens per reference block.
    """
    covered = (group.block_size_tokens * blocks for group, blocks in zip(groups, num_blocks, strict=True))
    return min(covered, default=0) // reference_block_tokens


@dataclass(frozen=True)
class Pack:
    """Groups that are stored together: one object per unit of ``unit_tokens`` tokens."""

    name: str
    unit_tokens: int
    policy: HitPolicy
    hash_factor: int
    """Hash blocks per unit: ``unit_tokens / hash_block_size``."""
    groups: tuple[GroupGeometry, ...]
    lookahead_blocks: int = 0
    """Hash blocks behind a unit that its content depends on. They are part of its name."""

    def units_in(self, tokens: int) -> int:
        """Return the number of leading units that are whole after ``tokens`` tokens."""
        return tokens // self.unit_tokens

    def tokens_in(self, units: int) -> int:
        """Return the number of tokens in the first ``units`` units."""
        return units * self.unit_tokens

    def hash_index(self, unit: int) -> int:
        """Return the index of the engine's block hash that names ``unit``.

        It is that of the unit's last hash block, or of the last block behind it that its content depends on.
        """
        return (unit + 1) * self.hash_factor - 1 + self.lookahead_blocks

    def named_units(self, hash_blocks: int) -> int:
        """Return the number of leading units that have a name after ``hash_blocks`` hash blocks."""
        return max(0, hash_blocks - self.lookahead_blocks) // self.hash_factor

    def stored_blocks(self, group: GroupGeometry) -> int:
        """Return the number of trailing blocks of ``group`` that one unit's object holds.

        Usually the object holds all blocks of the unit. A window shorter than the unit needs only the unit's tail, and
        the engine may free the rest before the unit is complete. A recurrent group has one block per boundary.
        """
        blocks_per_unit = self.unit_tokens // group.block_size_tokens
        if self.policy.kind == "state":
            return 1
        if self.policy.kind == "window":
            return min(blocks_per_unit, -(-(self.policy.window_tokens - 1) // group.block_size_tokens))
        return blocks_per_unit

    def block_range(self, group: GroupGeometry, unit: int) -> range:
        """Return the positions in ``group``'s block table of the blocks in ``unit``'s object."""
        return group.block_slice(self.unit_tokens, unit, unit + 1)[-self.stored_blocks(group) :]

    def needed_units(self, computed_tokens: int, boundary_tokens: int) -> range:
        """Return the units to load to extend a prefix of ``computed_tokens`` to one of ``boundary_tokens``."""
        first = max(computed_tokens, self.policy.first_needed_token(boundary_tokens))
        if first >= boundary_tokens:
            return range(0)
        return range(first // self.unit_tokens, boundary_tokens // self.unit_tokens)
