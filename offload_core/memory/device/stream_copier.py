"""Copies of KV cache blocks on an accelerator, by streams of their own.

- A gather copies blocks into a buffer on the device, on the engine's stream. So later work may reuse the blocks at
  once, and waits for no payload on the bus. The store stream then moves the buffer to host memory. If the blocks lie
  apart, their ids go to the device, and one call per reference selects their rows.
- A scatter copies host memory into blocks on the load stream, after all work that is on the engine's stream by then.

:mod:`offload_core.memory.device.stream_waits` has the waits between the streams. Copies between host and device are
torch's, or batched ones where the engine's installation has them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from offload_core.memory.block_copier import (
    BlockSlice,
    CopySpan,
    check_attached,
    check_slots,
    copy_spans,
)
from offload_core.memory.canonical import CanonicalKVCaches
from offload_core.memory.device.batched_copy import BatchedCopy, CacheAddresses, CopyPieces, pieces_to_blocks
from offload_core.memory.device.block_id_buffer import BlockIdBuffer
from offload_core.memory.device.device_buffer import DeviceBuffer
from offload_core.memory.device.stream_waits import StreamWaits
from offload_core.memory.payload_layout import PackLayout, PageRun

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
"""Types of the elements by which a device copies pages, by their bytes: the wider, the faster."""


class StreamEnd:
    """A :class:`~offload_core.memory.block_copier.CopyEnd` that an event of the device marks.

    Args:
        wait: the wait for the event.
    """

    def __init__(self, event: torch.Event, wait: Callable[[torch.Event], bool]) -> None:
        self._event = event
        self._wait = wait

    def has_passed(self) -> bool:
        """Return whether the device has reached the event. Never waits."""
        return self._wait(self._event)


@dataclass(frozen=True)
class _Copies:
    """Copies that began together.

    Args:
        slots: number of slots of the device buffer that they leave.
        id_lists: number of lists in the buffer of block ids that they leave.
        descriptors: the descriptors that the device reads meanwhile.
    """

    end: torch.Event
    slots: int
    id_lists: int
    descriptors: Sequence[object]


@dataclass(frozen=True)
class _Gathered:
    """A gather whose move has not begun."""

    slot: torch.Tensor
    payload: torch.Tensor
    id_lists: int


class StreamBlockCopier:
    """A :class:`~offload_core.memory.block_copier.CacheCopier` for the memory of one accelerator.

    Payloads should be pinned. The runtime copies pageable memory piece by piece, and the call waits for that.

    The buffer on the device stays while the copier has no KV cache, since vLLM's sleep mode saves it and maps it again.

    Args:
        caches: the KV cache; all of its tensors are on one device.
        buffer_bytes: size of the buffer on the device; at least that of the largest payload. A gather that finds it
            full is refused.
        batched_copy: copies between host and device; ``None`` for torch's.

    Raises:
        ValueError: the tensors are on several devices.
    """

    takes_pageable_memory = False

    def __init__(self, caches: CanonicalKVCaches, buffer_bytes: int, batched_copy: BatchedCopy | None = None) -> None:
        self._tensors: list[torch.Tensor] = []
        self._addresses = CacheAddresses.of([])
        self._alignments: list[int] = []
        """Per tensor, the largest word of up to 8 bytes by which its rows can be copied."""
        self._rows: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        """Per tensor, page size and type of its elements, the pages of all blocks as rows."""
        self.attach(caches)
        self._device = self._tensors[0].device
        self._memory = torch.empty(buffer_bytes, dtype=torch.int8, device=self._device)
        self._buffer = DeviceBuffer(buffer_bytes)
        self._ids = BlockIdBuffer(self._device)
        self._batched_copy = batched_copy
        self._gathered: list[_Gathered] = []
        self._moves: deque[_Copies] = deque()
        self._scatters: deque[_Copies] = deque()
        """Batched scatters whose descriptors the device may still read."""
        self._descriptors: list[object] = []
        """Descriptors of scatters that no event has followed so far."""
        self._store_stream: Any = torch.Stream(device=self._device, priority=lowest_priority(self._device))
        self._load_stream: Any = torch.Stream(device=self._device)
        self._waits = StreamWaits(self._device, self._store_stream, self._load_stream)

    def gather(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> bool:
        """Copy blocks from the KV cache into ``payload``; see :class:`BlockCopier`."""
        if not self._tensors:
            return False
        check_slots(layout, blocks)  # before the slot: an error must not leave it without its move
        self._free_moved()
        start = self._buffer.try_take(len(payload))
        if start is None:
            return False
        slot = self._memory[start : start + len(payload)]
        ids = self._put_ids(blocks)
        for run in layout.runs:
            if run.group in ids:
                self._select(run, blocks[run.group].first_slot, ids[run.group], slot)
        others = [BlockSlice(0, ()) if group in ids else part for group, part in enumerate(blocks)]
        for span in copy_spans(layout, others):
            _pages(slot, span).copy_(self._blocks(span))
        self._gathered.append(_Gathered(slot, payload, len(ids)))
        return True

    def gathers_end(self) -> StreamEnd | None:
        """Begin the moves of all gathers so far, and return their end; see :class:`BlockCopier`."""
        if self._gathered:
            gathered, self._gathered = self._gathered, []
            self._waits.move_follows_gathers()
            with self._store_stream:
                descriptors = self._move(gathered)
            id_lists = sum(gather.id_lists for gather in gathered)
            self._moves.append(_Copies(self._store_stream.record_event(), len(gathered), id_lists, descriptors))
        return StreamEnd(self._moves[-1].end, self._waits.store_follows_move) if self._moves else None

    def scatter(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> None:
        """Copy blocks from ``payload`` into the KV cache; see :class:`BlockCopier`."""
        check_attached(self._tensors)
        self._free_descriptors()
        self._waits.scatter_follows_engine()
        with self._load_stream:
            if self._batched_copy is None:
                for span in copy_spans(layout, blocks):
                    self._blocks(span).copy_(_pages(payload, span), non_blocking=True)
                return
            pieces = pieces_to_blocks(layout, blocks, payload.data_ptr(), self._addresses)
            self._descriptors.append(self._batched_copy(pieces, from_host=True))

    def scatters_end(self) -> StreamEnd:
        """Return the end of all scatters so far; see :class:`BlockCopier`."""
        end = self._load_stream.record_event()
        if self._descriptors:
            self._scatters.append(_Copies(end, 0, 0, self._descriptors))
            self._descriptors = []
        return StreamEnd(end, self._waits.verdict_follows_scatter)

    def let_engine_follow_scatters(self) -> None:
        """Let later work of the engine begin after the scatters so far; see :class:`BlockCopier`."""
        self._waits.engine_follows_scatters()

    def wait(self) -> None:
        """Wait for the end of all copies."""
        self.gathers_end()
        self._waits.shutdown_follows_copies()

    def detach(self) -> None:
        """Wait for the end of all copies and let go of the KV cache; see :class:`CacheCopier`."""
        self.wait()
        self._free_moved()
        self._descriptors.clear()
        self._free_descriptors()
        self._tensors = []
        self._rows.clear()

    def attach(self, caches: CanonicalKVCaches) -> None:
        """Copy from and to these tensors from now on; see :class:`CacheCopier`."""
        tensors = [tensor.tensor for tensor in caches.tensors]
        devices = {tensor.device for tensor in tensors}
        if len(devices) != 1:
            raise ValueError(f"the KV cache is on several devices ({', '.join(map(str, devices))}); it must be on one")
        self._tensors = tensors
        self._addresses = CacheAddresses.of(tensors)
        self._alignments = [math.gcd(8, one.stride(0), one.data_ptr(), one.storage_offset()) for one in tensors]

    def _put_ids(self, blocks: Sequence[BlockSlice]) -> dict[int, torch.Tensor]:
        """Return, on the device, the block ids of each group whose blocks lie apart, as far as there is room."""
        ids = {}
        for group, part in enumerate(blocks):
            if any(later != earlier + 1 for earlier, later in pairwise(part.block_ids)):
                there = self._ids.try_put(part.block_ids)
                if there is not None:
                    ids[group] = there
        return ids

    def _select(self, run: PageRun, first_slot: int, ids: torch.Tensor, payload: torch.Tensor) -> None:
        """Copy the pages of blocks into a payload on the device by one call."""
        first = run.offset_bytes + first_slot * run.page_bytes
        word = _WORDS[math.gcd(self._alignments[run.tensor_index], run.page_bytes, first)]
        rows = self._rows.get((run.tensor_index, run.page_bytes, word))
        if rows is None:
            rows = self._tensors[run.tensor_index][:, : run.page_bytes].view(word)
            self._rows[run.tensor_index, run.page_bytes, word] = rows
        pages = payload[first : first + len(ids) * run.page_bytes].view(word).view(len(ids), -1)
        torch.index_select(rows, 0, ids, out=pages)

    def _move(self, gathered: Sequence[_Gathered]) -> list[object]:
        """Begin the copies from the device buffer, on the current stream; return their descriptors."""
        if self._batched_copy is None:
            for gather in gathered:
                gather.payload.copy_(gather.slot, non_blocking=True)
            return []
        pieces = CopyPieces.of(
            (gather.slot.data_ptr(), gather.payload.data_ptr(), len(gather.payload)) for gather in gathered
        )
        return [self._batched_copy(pieces, from_host=False)]

    def _free_moved(self) -> None:
        """Free the slots whose bytes are in host memory, in the order in which they were taken."""
        while self._moves and self._waits.gather_follows_move(self._moves[0].end):
            moved = self._moves.popleft()
            for _ in range(moved.slots):
                self._buffer.free_oldest()
            for _ in range(moved.id_lists):
                self._ids.free_oldest()

    def _free_descriptors(self) -> None:
        """Free the descriptors of the scatters that have ended."""
        while self._scatters and self._waits.descriptors_follow_copy(self._scatters[0].end):
            self._scatters.popleft()

    def _blocks(self, span: CopySpan) -> torch.Tensor:
        return self._tensors[span.tensor_index][span.block_id : span.block_id + span.blocks, : span.page_bytes]


def lowest_priority(device: torch.device) -> int:
    """Return the lowest priority of a stream in torch, which is 0, the default, on all devices but Intel's GPUs."""
    return 1 if device.type == "xpu" else 0


def _pages(payload: torch.Tensor, span: CopySpan) -> torch.Tensor:
    end = span.offset_bytes + span.blocks * span.page_bytes
    return payload[span.offset_bytes : end].view(span.blocks, span.page_bytes)
