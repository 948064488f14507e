"""Which values of ``hybrid_chunk_size`` work for a model, and what to say about those that do not or do badly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from offload_core.planning.packs import GroupGeometry

_DEFAULT_CHUNK_TOKENS = 256
_MOST_ODD_TOKENS = 1 << 14


def unit_tokens(group: GroupGeometry, chunk_tokens: int) -> int:
    """Return the unit of ``group``: the chunk where whole blocks fill it, else one block."""
    return group.block_size_tokens if chunk_tokens % group.block_size_tokens else chunk_tokens


@dataclass(frozen=True)
class ChunkSizes:
    """The chunk sizes for ``groups`` (at least one) in an engine whose sequences stay below ``max_model_len``."""

    groups: tuple[GroupGeometry, ...]
    max_model_len: int

    def boundary_tokens(self, chunk_tokens: int) -> int:
        """Return the distance in tokens between boundaries: the least common multiple of all units."""
        return math.lcm(*(unit_tokens(group, chunk_tokens) for group in self.groups))

    def problem(self, chunk_tokens: int) -> str | None:
        """Return why nothing could ever be stored or loaded in chunks of ``chunk_tokens``, or ``None``."""
        boundary = self.boundary_tokens(chunk_tokens)
        for group in self.groups:
            unit = unit_tokens(group, chunk_tokens)
            attention_chunk = group.policy.attention_chunk_tokens
            if group.policy.kind == "chunked" and boundary % attention_chunk and attention_chunk % unit:
                return (
                    f"group {group.index} has chunked local attention of {attention_chunk} tokens and, with block size "
                    f"{group.block_size_tokens} and hybrid_chunk_size {chunk_tokens}, units of {unit} tokens; neither "
                    "divides the other, so the engine may free a part of a unit before the unit is complete"
                )
        if all(group.policy.needs_nothing_at_multiples_of(boundary) for group in self.groups):
            return (
                f"hybrid_chunk_size {chunk_tokens} gives boundaries at multiples of {boundary} tokens, and there no "
                f"group needs any of its cache ({self._described()}), so there is nothing to offload"
            )
        if boundary >= self.max_model_len:
            units = ", ".join(f"group {group.index}: {unit_tokens(group, chunk_tokens)}" for group in self.groups)
            return (
                f"hybrid_chunk_size {chunk_tokens} gives the first boundary at {boundary} tokens (units of {units}), "
                f"but max_model_len is {self.max_model_len} and the last token is always computed, so nothing could "
                "ever be loaded"
            )
        return None

    @cached_property
    def default(self) -> int | None:
        """A chunk size that works, if possible one that fits every group, or ``None`` where no chunk size works.

        The smallest where a group is recurrent, because every state is worth having, or where blocks are large; near
        256 tokens otherwise.
        """
        recurrent = any(group.policy.kind == "state" for group in self.groups)
        coarse = not recurrent and self.smallest < _DEFAULT_CHUNK_TOKENS < self.max_model_len
        multiple = self.nearest(_DEFAULT_CHUNK_TOKENS) if coarse else self.smallest
        sizes = (chunk for chunk in (multiple, *self._odd_sizes()) if chunk and not self.problem(chunk))
        return next(sizes, None)

    def nearest(self, chunk_tokens: int) -> int | None:
        """Return the working chunk size nearest to ``chunk_tokens`` among those that whole blocks of all groups fill.

        There is one exactly where the smallest of them works.
        """
        if self.problem(self.smallest):
            return None
        return next((chunk for chunk in self._multiples_around(chunk_tokens) if not self.problem(chunk)), None)

    def cure(self, chunk_tokens: int) -> str:
        """Return what to do about the :meth:`problem` of ``chunk_tokens``."""
        too_long = self.boundary_tokens(chunk_tokens) >= self.max_model_len
        good = self.default if too_long else self.nearest(chunk_tokens) or self.default
        if good is not None:
            return f"set hybrid_chunk_size to {good}"
        for chunk in (self.smallest, *self._odd_sizes()):
            enough = self.boundary_tokens(chunk) + 1
            if not ChunkSizes(self.groups, enough).problem(chunk):
                return (
                    f"raise max_model_len to {enough} or more and set hybrid_chunk_size to {chunk}, or choose smaller "
                    "blocks"
                )
        return "turn offloading off for this model"

    def warnings(self, chunk_tokens: int) -> Iterator[str]:
        """Yield what works but badly with ``chunk_tokens``, which must work, and which chunk size does better."""
        default = self.default if self.default and not self._odd_groups(self.default) else chunk_tokens
        nearest = self.nearest(chunk_tokens) or default
        boundary = self.boundary_tokens(chunk_tokens)
        odd = self._odd_groups(chunk_tokens)
        better = "none does better" if nearest == chunk_tokens else f"the nearest good hybrid_chunk_size is {nearest}"
        for group in odd:
            yield (
                f"group {group.index}: hybrid_chunk_size {chunk_tokens} is not a multiple of its block size "
                f"{group.block_size_tokens}, so it is stored block by block; {better}"
            )
        largest = max(self.groups, key=lambda group: unit_tokens(group, chunk_tokens))
        if not odd and self.boundary_tokens(nearest) < boundary != unit_tokens(largest, chunk_tokens):
            yield (
                f"group {largest.index}: its block size {largest.block_size_tokens} is not a multiple of "
                f"hybrid_chunk_size {chunk_tokens}, so prefixes can be loaded only at multiples of {boundary} tokens; "
                f"with hybrid_chunk_size {nearest}, at multiples of {self.boundary_tokens(nearest)}"
            )
        for group in self.groups:
            skips = unit_tokens(group, chunk_tokens) > group.block_size_tokens
            if group.policy.kind == "state" and skips and self.boundary_tokens(default) < boundary:
                yield (
                    f"group {group.index} is recurrent: the engine hands over its states at multiples of "
                    f"{group.block_size_tokens} tokens, and with hybrid_chunk_size {chunk_tokens} only those at "
                    f"multiples of {boundary} are used; hybrid_chunk_size {default} uses every one that the other "
                    "groups can follow"
                )

    @cached_property
    def smallest(self) -> int:
        """The smallest chunk size that whole blocks of all groups fill and that fits every attention chunk.

        It divides all others: a common multiple that divides no attention chunk has no multiple that does, so it has to
        become a multiple of that attention chunk.
        """
        smallest = math.lcm(*(group.block_size_tokens for group in self.groups))
        attention_chunks = {g.policy.attention_chunk_tokens for g in self.groups if g.policy.kind == "chunked"}
        while unfit := [chunk for chunk in attention_chunks if chunk % smallest and smallest % chunk]:
            smallest = math.lcm(smallest, *unfit)
        return smallest

    def _odd_groups(self, chunk_tokens: int) -> list[GroupGeometry]:
        """Return the groups of which a chunk has room for more than a block, and not for whole blocks only."""
        return [g for g in self.groups if g.block_size_tokens < chunk_tokens and chunk_tokens % g.block_size_tokens]

    def _odd_sizes(self) -> Iterator[int]:
        """Yield chunk sizes that whole blocks of some groups only fill, as far as anybody would set one.

        Few models need one: where boundaries must miss the ends of attention chunks for there to be anything to store.
        """
        yield self._smallest_block
        yield from range(1, min(self.smallest, _MOST_ODD_TOKENS))

    @cached_property
    def _smallest_block(self) -> int:
        """With this chunk size every group is stored block by block."""
        return min(group.block_size_tokens for group in self.groups)

    def _multiples_around(self, chunk_tokens: int) -> Iterator[int]:
        """Yield the multiples of the smallest chunk size below ``max_model_len``, nearest first."""
        step = self.smallest
        last = (self.max_model_len - 1) // step
        middle = max(1, min((chunk_tokens + step // 2) // step, last))
        for distance in range(max(middle, last - middle + 1)):
            pair = {middle - distance, middle + distance}
            yield from (k * step for k in sorted(pair, key=lambda k: abs(k * step - chunk_tokens)) if 1 <= k <= last)

    def _described(self) -> str:
        return ", ".join(f"group {group.index}: {group.policy}" for group in self.groups)
