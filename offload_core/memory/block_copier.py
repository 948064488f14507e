"""Copies between the blocks of the KV cache and the payloads of packs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from offload_core.memory.canonical import CanonicalKVCaches
from offload_core.memory.payload_layout import PackLayout

COPY_BYTES = 512 * 1024
"""Maximum number of bytes of one copy in host memory: both sides are still in the processor's cache afterwards."""
COPY_LOOK_SECONDS = 0.001
"""Time between two looks for the end of a copy on a device."""

OnPart = Callable[[int], object]
"""Gets the number of bytes of a payload's next part, right after its copy, on the thread that copies.

The parts come in order, without gaps. So the caller finds each part in the processor's cache.
"""

Bytes: TypeAlias = npt.NDArray[np.int8]
Copy: TypeAlias = tuple[Bytes, Bytes, int]
"""The bytes of one copy in the payload, those outside, and the end of those in the payload."""


@dataclass(frozen=True)
class BlockSlice:
    """The blocks of one group in a copy.

    Args:
        first_slot: payload slot of the first block; the others follow in order. A slot holds one page per reference.
        block_ids: ids in the engine's KV cache.
    """

    first_slot: int
    block_ids: tuple[int, ...]


class CopyEnd(Protocol):
    """The end of some copies that go on after the call that began them. Any thread may use it."""

    def has_passed(self) -> bool:
        """Return whether the copies are complete. Never waits."""
        ...


class PartCopier(Protocol):
    """The copies of a :class:`BlockCopier` of which each is complete when its call returns."""

    def gather_in_parts(
        self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor, on_part: OnPart
    ) -> bool:
        """Copy blocks into ``payload`` as :meth:`BlockCopier.gather` does, and tell of each part of the payload."""
        ...

    def scatter_in_parts(
        self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor, on_part: OnPart
    ) -> None:
        """Copy ``payload`` into blocks as :meth:`BlockCopier.scatter` does, and tell of each part of the payload."""
        ...


class BlockCopier(Protocol):
    """Copies between KV cache blocks and payloads. Only the engine's own thread calls it (invariant I2).

    The framework guarantees that block ids are within the tensors and that payloads have the layout's size. A payload
    is an int8 tensor of shape ``(layout.payload_bytes,)`` in host memory. No call waits for a copy on a device.

    A copy may go on after its call. Until its end has passed, nobody else may use the payload.
    """

    @property
    def takes_pageable_memory(self) -> bool:
        """True if payloads may be in any host memory; false if they should be pinned, so that no call waits."""
        ...

    @property
    def takes_pinned_pieces(self) -> bool:
        """True if a payload may lie in several pieces of memory that were pinned one by one."""
        ...

    @property
    def in_parts(self) -> PartCopier | None:
        """The same copies in parts, for a caller that reads them meanwhile; ``None`` if copies go on after calls."""
        ...

    @property
    def gather_bytes(self) -> float:
        """The bytes of gathers that may be on their way at once; infinite if each is complete when its call returns."""
        ...

    def has_room(self, payload_bytes: int) -> bool:
        """Return whether there is memory for the gather of a payload on its way."""
        ...

    def gather(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> bool:
        """Copy blocks (one slice per group of the pack) from the KV cache into ``payload``.

        The engine may write to the blocks after :meth:`gathers_end`, since its device runs that work after the copy.

        Returns:
            ``False`` if there is no memory for the copy on its way. Nothing is copied then.
        """
        ...

    def gathers_end(self) -> CopyEnd | None:
        """Return the end of all gathers so far; ``None`` if they are complete.

        Call it after the gathers of a step. A device may begin them only then, all together.
        """
        ...

    def scatter(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> None:
        """Copy blocks (one slice per group of the pack) from ``payload`` into the KV cache.

        Call :meth:`scatters_end` after some scatters. A device may begin them only then, all together, after all work
        that the engine has given to it by then.
        """
        ...

    def scatters_end(self) -> CopyEnd | None:
        """Return the end of all scatters so far; ``None`` if they are complete."""
        ...

    def let_engine_follow_scatters(self) -> None:
        """Let all later work of the engine on its device begin after the scatters so far."""
        ...

    def wait(self) -> None:
        """Wait for the end of all copies. For the shutdown, and before the KV cache goes."""
        ...


class CacheCopier(BlockCopier, Protocol):
    """A :class:`BlockCopier` for a KV cache that may lose its memory, as in a sleep of the engine."""

    def detach(self) -> None:
        """Wait for the end of all copies and let go of the KV cache, whose memory is about to go.

        Every gather is refused then, and a scatter is an error, until :meth:`attach`. Idempotent.
        """
        ...

    def attach(self, caches: CanonicalKVCaches) -> None:
        """Copy from and to these tensors from now on. They have the layout of those before."""
        ...


class HostMemoryCopier(ABC):
    """A :class:`BlockCopier` between places in host memory. Each copy is complete when its call returns.

    numpy copies, and lets other threads run meanwhile. For pages of this size, torch would start its thread pool. Those
    threads then spin for a while on the cores that the I/O threads need.

    Args:
        part_bytes: maximum number of bytes of one copy. A part of which the caller is told has at least half of them,
            but for the last one.
    """

    takes_pageable_memory = takes_pinned_pieces = True
    gather_bytes = math.inf

    def __init__(self, part_bytes: int = COPY_BYTES) -> None:
        self._part_bytes = part_bytes

    @abstractmethod
    def _copies(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: Bytes) -> Iterator[Copy]:
        """Yield the copies of one payload, in the order of their bytes in it."""

    def has_room(self, payload_bytes: int) -> bool:
        """Return ``True``: a gather needs no memory beside the payload."""
        return True

    @property
    def in_parts(self) -> PartCopier:
        """This copier."""
        return self

    def gather(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> bool:
        """Copy into ``payload``; see :class:`BlockCopier`."""
        return self.gather_in_parts(layout, blocks, payload, _to_nobody)

    def gather_in_parts(
        self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor, on_part: OnPart
    ) -> bool:
        """Copy into ``payload``; see :class:`PartCopier`."""
        if not self.has_room(len(payload)):
            return False
        self._copy(layout, blocks, payload.numpy(), on_part, to_payload=True)
        return True

    def gathers_end(self) -> None:
        """Return ``None``: the gathers are complete."""
        return

    def scatter(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> None:
        """Copy from ``payload``; see :class:`BlockCopier`."""
        self.scatter_in_parts(layout, blocks, payload, _to_nobody)

    def scatter_in_parts(
        self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor, on_part: OnPart
    ) -> None:
        """Copy from ``payload``; see :class:`PartCopier`."""
        self._copy(layout, blocks, payload.numpy(), on_part, to_payload=False)

    def scatters_end(self) -> None:
        """Return ``None``: the scatters are complete."""
        return

    def let_engine_follow_scatters(self) -> None:
        """Do nothing: the scatters are complete."""
        return

    def wait(self) -> None:
        """Do nothing: the copies are complete."""
        return

    def _copy(
        self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: Bytes, on_part: OnPart, *, to_payload: bool
    ) -> None:
        least_bytes = self._part_bytes // 2
        told = 0
        for inside, outside, end in self._copies(layout, blocks, payload):
            if to_payload:
                np.copyto(inside, outside)
            else:
                np.copyto(outside, inside)
            if end - told >= least_bytes:
                on_part(end - told)
                told = end
        if told < len(payload):
            on_part(len(payload) - told)


class CpuBlockCopier(HostMemoryCopier):
    """Copies for KV caches in host memory; a :class:`CacheCopier`.

    Args:
        part_bytes: see :class:`HostMemoryCopier`.
    """

    def __init__(self, caches: CanonicalKVCaches, part_bytes: int = COPY_BYTES) -> None:
        super().__init__(part_bytes)
        self._arrays: list[Bytes] = []
        self.attach(caches)

    def has_room(self, payload_bytes: int) -> bool:
        """Return whether there is a KV cache; see :class:`BlockCopier`."""
        return bool(self._arrays)

    def detach(self) -> None:
        """Let go of the KV cache; see :class:`CacheCopier`."""
        self._arrays = []

    def attach(self, caches: CanonicalKVCaches) -> None:
        """Copy from and to these tensors; see :class:`CacheCopier`."""
        self._arrays = [tensor.tensor.numpy() for tensor in caches.tensors]

    def _copies(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: Bytes) -> Iterator[Copy]:
        """Yield the copies of one payload: the bytes in it, those in the KV cache, and the end of those in it.

        The ends increase. Slots that get no page lie between two of them.
        """
        check_attached(self._arrays)
        for tensor_index, page_bytes, block_id, count, start in copy_spans(layout, blocks):
            end = start + count * page_bytes
            pages = payload[start:end].reshape(count, page_bytes)
            cached = self._arrays[tensor_index][block_id : block_id + count, :page_bytes]
            if end - start <= self._part_bytes:
                yield pages, cached, end
                continue
            rows, columns = max(1, self._part_bytes // page_bytes), min(self._part_bytes, page_bytes)
            for row in range(0, count, rows):
                for column in range(0, page_bytes, columns):
                    part = pages[row : row + rows, column : column + columns]
                    part_end = start + row * page_bytes + column + part.size
                    yield part, cached[row : row + rows, column : column + columns], part_end


def _to_nobody(nbytes: int) -> None:
    """Take the number of bytes of a part, and do nothing."""


def check_attached(tensors: Sequence[object]) -> None:
    """Raise unless the copier has a KV cache.

    Raises:
        DetachedError: the KV cache is gone, as during a sleep of the engine.
    """
    if not tensors:
        raise DetachedError("a copy into the KV cache while it is gone: all loads must end before the copier lets go")


class DetachedError(RuntimeError):
    """A copy into a KV cache that is gone: a defect of the core."""


class CopySpan(NamedTuple):
    """The pages of one copy: consecutive blocks of one reference.

    Args:
        offset_bytes: position of the first page in the payload.
    """

    tensor_index: int
    page_bytes: int
    block_id: int
    blocks: int
    offset_bytes: int


def check_slots(layout: PackLayout, blocks: Sequence[BlockSlice]) -> None:
    """Raise unless a payload of ``layout`` has a slot for each block.

    Raises:
        ValueError: a slice has more blocks than the payload has slots from its first one on.
    """
    for group, slots in layout.group_slots:
        part = blocks[group]
        if part.first_slot + len(part.block_ids) > slots:
            raise ValueError(
                f"pack {layout.name}: slots {part.first_slot} to {part.first_slot + len(part.block_ids) - 1} do not "
                f"all exist; slots are 0 to {slots - 1}"
            )


def copy_spans(layout: PackLayout, blocks: Sequence[BlockSlice]) -> Iterator[CopySpan]:
    """Yield the copies between blocks and a payload of ``layout``.

    Raises:
        ValueError: a slice has more blocks than the payload has slots from its first one on.
    """
    check_slots(layout, blocks)
    consecutive = [tuple(consecutive_blocks(part.block_ids)) for part in blocks]
    for run in layout.runs:
        for position, block_id, count in consecutive[run.group]:
            slot = blocks[run.group].first_slot + position
            yield CopySpan(run.tensor_index, run.page_bytes, block_id, count, run.offset_bytes + slot * run.page_bytes)


def consecutive_blocks(block_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield ``(position in block_ids, first block id, number of blocks)`` for each run of consecutive ids."""
    start = 0
    for position in range(1, len(block_ids) + 1):
        if position == len(block_ids) or block_ids[position] != block_ids[position - 1] + 1:
            yield start, block_ids[start], position - start
            start = position
