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
    """The blocks of one group that a copy touches: payload slots ``first_slot``, ``first_slot + 1``, … in order."""

    first_slot: int
    block_ids: tuple[int, ...]


class BlockCopier(Protocol):
    """Copies between KV cache blocks and payloads. Called by the engine's own thread only (invariant I2).

    The framework guarantees that block ids are within the tensors and that payloads have the layout's size. An
    implementation must have finished with the payload when it returns.
    """

    def gather(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> None:
        """Copy blocks (one slice per group of the pack) from the KV cache into ``payload``, int8 of shape (bytes,)."""
        ...

    def scatter(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> None:
        """Copy blocks (one slice per group of the pack) from ``payload`` into the KV cache."""
        ...


class TorchBlockCopier:
    """Copies by torch, for KV caches on any device.

    On an accelerator the copies go to the calling thread's current stream, the engine's compute stream, so they are
    ordered with the forward passes; the calling thread waits for them.
    """

    def __init__(self, caches: CanonicalKVCaches) -> None:
        self._tensors = [tensor.tensor for tensor in caches.tensors]

    def gather(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> None:
        """Copy blocks from the KV cache into ``payload``; see :class:`BlockCopier`."""
        for span in _spans(layout, blocks):
            self._pages(payload, span).copy_(self._blocks(span))

    def scatter(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> None:
        """Copy blocks from ``payload`` into the KV cache; see :class:`BlockCopier`."""
        for span in _spans(layout, blocks):
            self._blocks(span).copy_(self._pages(payload, span))

    def _blocks(self, span: _Span) -> torch.Tensor:
        return self._tensors[span.tensor_index][span.block_id : span.block_id + span.blocks, : span.page_bytes]

    def _pages(self, payload: torch.Tensor, span: _Span) -> torch.Tensor:
        end = span.offset_bytes + span.blocks * span.page_bytes
        return payload[span.offset_bytes : end].view(span.blocks, span.page_bytes)


class CpuBlockCopier:
    """Copies by numpy, for KV caches in host memory.

    torch would start its thread pool for pages of this size, whose threads then spin for a while on the cores that the
    I/O threads need.
    """

    def __init__(self, caches: CanonicalKVCaches) -> None:
        self._arrays = [tensor.tensor.numpy() for tensor in caches.tensors]

    def gather(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> None:
        """Copy blocks from the KV cache into ``payload``; see :class:`BlockCopier`."""
        pages = payload.numpy()
        for span in _spans(layout, blocks):
            np.copyto(self._pages(pages, span), self._blocks(span))

    def scatter(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> None:
        """Copy blocks from ``payload`` into the KV cache; see :class:`BlockCopier`."""
        pages = payload.numpy()
        for span in _spans(layout, blocks):
            np.copyto(self._blocks(span), self._pages(pages, span))

    def _blocks(self, span: _Span) -> npt.NDArray[np.int8]:
        return self._arrays[span.tensor_index][span.block_id : span.block_id + span.blocks, : span.page_bytes]

    def _pages(self, payload: npt.NDArray[np.int8], span: _Span) -> npt.NDArray[np.int8]:
        end = span.offset_bytes + span.blocks * span.page_bytes
        return payload[span.offset_bytes : end].reshape(span.blocks, span.page_bytes)


def block_copier(caches: CanonicalKVCaches) -> BlockCopier:
    """Return the copier for the memory that ``caches`` lie in."""
    in_host_memory = all(tensor.tensor.device.type == "cpu" for tensor in caches.tensors)
    return CpuBlockCopier(caches) if in_host_memory else TorchBlockCopier(caches)


class _Span(NamedTuple):
    """Pages of consecutive blocks of one reference, which one copy moves."""

    tensor_index: int
    page_bytes: int
    block_id: int
    blocks: int
    offset_bytes: int


def _spans(layout: PackLayout, blocks: Sequence[BlockSlice]) -> Iterator[_Span]:
    consecutive = [tuple(_consecutive(part.block_ids)) for part in blocks]
    for run in layout.runs:
        for position, block_id, count in consecutive[run.group]:
            slot = blocks[run.group].first_slot + position
            if slot + count > run.blocks:
                raise ValueError(f"pack {layout.name}: slots {slot} to {slot + count - 1}, but it has {run.blocks}")
            yield _Span(run.tensor_index, run.page_bytes, block_id, count, run.offset_bytes + slot * run.page_bytes)


def _consecutive(block_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield ``(position, first block id, count)`` for each run of consecutive ids."""
    start = 0
    for position in range(1, len(block_ids) + 1):
        if position == len(block_ids) or block_ids[position] != block_ids[position - 1] + 1:
            yield start, block_ids[start], position - start
            start = position
