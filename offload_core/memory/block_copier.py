"""Copies between the blocks of the KV cache and the payloads of packs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from offload_core.memory.canonical import CanonicalKVCaches
from offload_core.memory.payload_layout import PackLayout


@dataclass(frozen=True)
class BlockSlice:
    """The blocks of one group in a copy.

    Args:
        first_slot: payload slot of the first block; the others follow in order. A slot holds one page per reference.
        block_ids: ids in the engine's KV cache.
    """

    first_slot: int
    block_ids: tuple[int, ...]


class BlockCopier(Protocol):
    """Copies between KV cache blocks and payloads. Only the engine's own thread calls it (invariant I2).

    The framework guarantees that block ids are within the tensors and that payloads have the layout's size. A payload
    is an int8 tensor of shape ``(layout.payload_bytes,)``. A copy must be complete when the method returns.
    """

    def gather(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> None:
        """Copy blocks (one slice per group of the pack) from the KV cache into ``payload``."""
        ...

    def scatter(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> None:
        """Copy blocks (one slice per group of the pack) from ``payload`` into the KV cache."""
        ...


class TorchBlockCopier:
    """Copies with torch, for KV caches on any device.

    On an accelerator the copies go to the calling thread's current stream, which is the engine's compute stream. So
    they are in order with the forward passes, and the calling thread waits for them.
    """

    def __init__(self, caches: CanonicalKVCaches) -> None:
        self._tensors = [tensor.tensor for tensor in caches.tensors]

    def gather(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> None:
        """Copy blocks from the KV cache into ``payload``; see :class:`BlockCopier`."""
        for span in _copy_spans(layout, blocks):
            self._pages(payload, span).copy_(self._blocks(span))

    def scatter(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> None:
        """Copy blocks from ``payload`` into the KV cache; see :class:`BlockCopier`."""
        for span in _copy_spans(layout, blocks):
            self._blocks(span).copy_(self._pages(payload, span))

    def _blocks(self, span: _CopySpan) -> torch.Tensor:
        return self._tensors[span.tensor_index][span.block_id : span.block_id + span.blocks, : span.page_bytes]

    def _pages(self, payload: torch.Tensor, span: _CopySpan) -> torch.Tensor:
        end = span.offset_bytes + span.blocks * span.page_bytes
        return payload[span.offset_bytes : end].view(span.blocks, span.page_bytes)


class CpuBlockCopier:
    """Copies with numpy, for KV caches in host memory.

    For pages of this size, torch would start its thread pool. Those threads then spin for a while on the cores that the
    I/O threads need.
    """

    def __init__(self, caches: CanonicalKVCaches) -> None:
        self._arrays = [tensor.tensor.numpy() for tensor in caches.tensors]

    def gather(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> None:
        """Copy blocks from the KV cache into ``payload``; see :class:`BlockCopier`."""
        pages = payload.numpy()
        for span in _copy_spans(layout, blocks):
            np.copyto(self._pages(pages, span), self._blocks(span))

    def scatter(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> None:
        """Copy blocks from ``payload`` into the KV cache; see :class:`BlockCopier`."""
        pages = payload.numpy()
        for span in _copy_spans(layout, blocks):
            np.copyto(self._blocks(span), self._pages(pages, span))

    def _blocks(self, span: _CopySpan) -> npt.NDArray[np.int8]:
        return self._arrays[span.tensor_index][span.block_id : span.block_id + span.blocks, : span.page_bytes]

    def _pages(self, payload: npt.NDArray[np.int8], span: _CopySpan) -> npt.NDArray[np.int8]:
        end = span.offset_bytes + span.blocks * span.page_bytes
        return payload[span.offset_bytes : end].reshape(span.blocks, span.page_bytes)


def block_copier(caches: CanonicalKVCaches) -> BlockCopier:
    """Return the copier for the memory of ``caches``."""
    in_host_memory = all(tensor.tensor.device.type == "cpu" for tensor in caches.tensors)
    return CpuBlockCopier(caches) if in_host_memory else TorchBlockCopier(caches)


class _CopySpan(NamedTuple):
    """The pages of one copy: consecutive blocks of one reference.

    Args:
        offset_bytes: position of the first page in the payload.
    """

    tensor_index: int
    page_bytes: int
    block_id: int
    blocks: int
    offset_bytes: int


def _copy_spans(layout: PackLayout, blocks: Sequence[BlockSlice]) -> Iterator[_CopySpan]:
    consecutive = [tuple(_consecutive(part.block_ids)) for part in blocks]
    for run in layout.runs:
        for position, block_id, count in consecutive[run.group]:
            slot = blocks[run.group].first_slot + position
            if slot + count > run.blocks:
                raise ValueError(
                    f"pack {layout.name}: slots {slot} to {slot + count - 1} do not all exist; "
                    f"slots are 0 to {run.blocks - 1}"
                )
            yield _CopySpan(run.tensor_index, run.page_bytes, block_id, count, run.offset_bytes + slot * run.page_bytes)


def _consecutive(block_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield ``(position in block_ids, first block id, number of blocks)`` for each run of consecutive ids."""
    start = 0
    for position in range(1, len(block_ids) + 1):
        if position == len(block_ids) or block_ids[position] != block_ids[position - 1] + 1:
            yield start, block_ids[start], position - start
            start = position
