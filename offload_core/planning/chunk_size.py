"""The values of ``hybrid_chunk_size`` that work for a model, and the messages about the others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from offload_core.planning.packs import GroupGeometry

_DEFAULT_CHUNK_TOKENS = 256
_MAX_MISFIT_TOKENS = 1 << 14


def unit_tokens(group: GroupGeometry, chunk_tokens: int) -> int:
    """Return the unit of ``group`` in tokens: one chunk if whole blocks fill it, else one block."""
    return group.block_size_tokens if chunk_tokens % group.block_size_tokens else chunk_tokens


@dataclass(frozen=True)
class ChunkSizes:
    """The possible chunk sizes of a model.

    Args:
        groups: the KV cache groups, at least one.
        max_model_len: longest sequence of the engine in tokens.
    """

    groups: tuple[GroupGeometry, ...]
    max_model_len: int

    def boundary_tokens(self, chunk_tokens: int) -> int:
        """Return the distance in tokens between boundaries: the least common multiple of all units."""
        return math.lcm(*(unit_tokens(group, chunk_tokens) for group in self.groups))

    def problem(self, chunk_tokens: int) -> str | None:
        """Return the reason why chunks of ``chunk_tokens`` could never be stored or loaded, or ``None``."""
        boundary = self.boundary_tokens(chunk_tokens)
        for group in self.groups:
            unit = unit_tokens(group, chunk_tokens)
            attention_chunk = group.policy.attention_chunk_tokens
            if group.policy.kind == "chunked" and boundary % attention_chunk and attention_chunk % unit:
                return (
                    f"group {group.index} has chunked local attention of {attention_chunk} tokens and, with block size "
                    f"{group.block_size_tokens} and hybrid_chunk_size {chunk_tokens}, units of {unit} tokens; neither "
                    "is a multiple of the other, so the engine may free a part of a unit before the unit is complete"
                )
        if all(group.policy.needs_nothing_at_multiples_of(boundary) for group in self.groups):
            return (
                f"hybrid_chunk_size {chunk_tokens} gives boundaries at multiples of {boundary} tokens, and no group "
                f"needs any of its cache there ({self._policies_text()}), so there is nothing to offload"
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
        """The default chunk size, or ``None`` if no chunk size works.

        Usually it is near 256 tokens. It is the smallest one if blocks are large or a group is recurrent, because every
        state is useful. If possible, whole blocks of every group fill it.
        """
        recurrent = any(group.policy.kind == "state" for group in self.groups)
        coarse = not recurrent and self.smallest < _DEFAULT_CHUNK_TOKENS < self.max_model_len
        multiple = self.nearest(_DEFAULT_CHUNK_TOKENS) if coarse else self.smallest
        sizes = (chunk for chunk in (multiple, *self._misfit_sizes()) if chunk and not self.problem(chunk))
        return next(sizes, None)

    def nearest(self, chunk_tokens: int) -> int | None:
        """Return the working chunk size nearest to ``chunk_tokens`` that whole blocks of all groups fill.

        There is none if the smallest of these sizes does not work.
        """
        if self.problem(self.smallest):
            return None
        return next((chunk for chunk in self._multiples_around(chunk_tokens) if not self.problem(chunk)), None)

    def cure(self, chunk_tokens: int) -> str:
        """Return the cure for the :meth:`problem` of ``chunk_tokens``."""
        too_long = self.boundary_tokens(chunk_tokens) >= self.max_model_len
        good = self.default if too_long else self.nearest(chunk_tokens) or self.default
        if good is not None:
            return f"set hybrid_chunk_size to {good}"
        for chunk in (self.smallest, *self._misfit_sizes()):
            enough = self.boundary_tokens(chunk) + 1
            if not ChunkSizes(self.groups, enough).problem(chunk):
                return (
                    f"raise max_model_len to {enough} or more and set hybrid_chunk_size to {chunk}, or choose smaller "
                    "blocks"
                )
        return "turn offloading off for this model"

    def warnings(self, chunk_tokens: int) -> Iterator[str]:
        """Yield the drawbacks of ``chunk_tokens``, which must be a working size, each with a better size."""
        default = self.default if self.default and not self._misfit_groups(self.default) else chunk_tokens
        nearest = self.nearest(chunk_tokens) or default
        boundary = self.boundary_tokens(chunk_tokens)
        misfits = self._misfit_groups(chunk_tokens)
        better = "none does better" if nearest == chunk_tokens else f"the nearest good hybrid_chunk_size is {nearest}"
        for group in misfits:
            yield (
                f"group {group.index}: hybrid_chunk_size {chunk_tokens} is not a multiple of its block size "
                f"{group.block_size_tokens}, so it is stored block by block; {better}"
            )
        largest = max(self.groups, key=lambda group: unit_tokens(group, chunk_tokens))
        if not misfits and self.boundary_tokens(nearest) < boundary != unit_tokens(largest, chunk_tokens):
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
                    f"multiples of {boundary} are used; hybrid_chunk_size {default} uses every one at which the other "
                    "groups have a boundary"
                )

    @cached_property
    def smallest(self) -> int:
        """The smallest chunk size that whole blocks of all groups fill and that fits every attention chunk.

        It divides all other such sizes. Suppose that a common multiple of the blocks does not divide an attention
        chunk: then none of its multiples does, so the size must become a multiple of the attention chunk.
        """
        smallest = math.lcm(*(group.block_size_tokens for group in self.groups))
        attention_chunks = {g.policy.attention_chunk_tokens for g in self.groups if g.policy.kind == "chunked"}
        while unfit := [chunk for chunk in attention_chunks if chunk % smallest and smallest % chunk]:
            smallest = math.lcm(smallest, *unfit)
        return smallest

    def _misfit_groups(self, chunk_tokens: int) -> list[GroupGeometry]:
        """Return the groups whose blocks are smaller than the chunk and do not divide it."""
        return [g for g in self.groups if g.block_size_tokens < chunk_tokens and chunk_tokens % g.block_size_tokens]

    def _misfit_sizes(self) -> Iterator[int]:
        """Yield chunk sizes that whole blocks of only some groups fill, up to a reasonable limit.

        Few models need one. Such a model has objects only at boundaries that are not ends of attention chunks.
        """
        yield self._smallest_block
        yield from range(1, min(self.smallest, _MAX_MISFIT_TOKENS))

    @cached_property
    def _smallest_block(self) -> int:
        """The smallest block size. With this chunk size every group is stored block by block."""
        return min(group.block_size_tokens for group in self.groups)

    def _multiples_around(self, chunk_tokens: int) -> Iterator[int]:
        """Yield the multiples of the smallest chunk size below ``max_model_len``, nearest first."""
        step = self.smallest
        last = (self.max_model_len - 1) // step
        middle = max(1, min((chunk_tokens + step // 2) // step, last))
        for distance in range(max(middle, last - middle + 1)):
            pair = {middle - distance, middle + distance}
            yield from (k * step for k in sorted(pair, key=lambda k: abs(k * step - chunk_tokens)) if 1 <= k <= last)

    def _policies_text(self) -> str:
        return ", ".join(f"group {group.index}: {group.policy}" for group in self.groups)
