"""Copies of KV cache blocks on an accelerator, by streams of their own.

- A gather copies blocks into a buffer on the device, on the engine's stream. So later work may reuse the blocks at
  once, and waits for no payload on the bus. The store stream then moves the buffer to host memory.
- A scatter copies host memory into blocks on the load stream, after all work that is on the engine's stream by then.

The copies of a step begin together, since each call of a device takes time of the engine's thread. For gathers the
block ids go to the device, and :mod:`offload_core.memory.device.gather_plan` has the calls that select their pages.

:mod:`offload_core.memory.device.stream_waits` has the waits between the streams. Copies between host and device are
torch's, or batched ones where the engine's installation has them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from offload_core.memory.device.batched_copy import (
    BatchedCopy,
    CacheAddresses,
    CopyPieces,
    Scatter,
    pieces_to_blocks,
)
from offload_core.memory.device.block_id_buffer import BlockIdBuffer
from offload_core.memory.device.device_buffer import DeviceBuffer, slot_bytes
from offload_core.memory.device.gather_plan import Gather, GatherPlan
from offload_core.memory.device.pinned_pieces import PinnedPieces
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


class StreamBlockCopier:
    """A :class:`~offload_core.memory.block_copier.CacheCopier` for the memory of one accelerator.

    Payloads should be pinned. The runtime copies pageable memory piece by piece, and the call waits for that.

    The buffer on the device stays while the copier has no KV cache, since vLLM's sleep mode saves it and maps it again.

    Args:
        caches: the KV cache; all of its tensors are on one device.
        buffer_bytes: size of the buffer on the device; at least that of the largest payload. A gather that finds it
            full is refused.
        batched_copy: copies between host and device; ``None`` for torch's.
        pinned: the pinned memory, if batched copies are to cross no border between its pieces.

    Raises:
        ValueError: the tensors are on several devices.
    """

    takes_pageable_memory = False
    in_parts = None

    def __init__(
        self,
        caches: CanonicalKVCaches,
        buffer_bytes: int,
        batched_copy: BatchedCopy | None = None,
        pinned: PinnedPieces | None = None,
    ) -> None:
        self._tensors: list[torch.Tensor] = []
        self._addresses = CacheAddresses.of([])
        self._alignments: list[int] = []
        """Per tensor, the largest word of up to 8 bytes by which its rows can be copied."""
        self._rows: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        """Per tensor, page size and type of its elements, the pages of all blocks as rows."""
        self.attach(caches)
        self._device = self._tensors[0].device
        self._memory = torch.empty(slot_bytes(buffer_bytes), dtype=torch.int8, device=self._device)
        self._buffer = DeviceBuffer(buffer_bytes)
        self.gather_bytes = float(buffer_bytes)
        self._ids = BlockIdBuffer(self._device)
        self.takes_pinned_pieces = batched_copy is not None and pinned is not None
        self._batched_copy = batched_copy
        if batched_copy is not None and pinned is not None:
            self._batched_copy = pinned.splitting(batched_copy)
        self._gathers: list[Gather] = []
        """Gathers that have not begun."""
        self._new_scatters: list[Scatter] = []
        """Scatters that have not begun."""
        self._moves: deque[_Copies] = deque()
        self._scatters: deque[_Copies] = deque()
        """Batched scatters whose descriptors the device may still read."""
        self._store_stream: Any = torch.Stream(device=self._device, priority=lowest_priority(self._device))
        self._load_stream: Any = torch.Stream(device=self._device)
        self._waits = StreamWaits(self._device, self._store_stream, self._load_stream)

    def has_room(self, payload_bytes: int) -> bool:
        """Return whether the device buffer has room; see :class:`BlockCopier`."""
        if not self._tensors:
            return False
        if self._buffer.has_room(payload_bytes):
            return True
        self._free_moved()
        return self._buffer.has_room(payload_bytes)

    def gather(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> bool:
        """Copy blocks from the KV cache into ``payload``; see :class:`BlockCopier`."""
        check_slots(layout, blocks)  # before the slot: an error must not leave it without its move
        if not self.has_room(len(payload)) or (start := self._buffer.try_take(len(payload))) is None:
            return False
        self._gathers.append(Gather(layout, blocks, payload, start))
        return True

    def gathers_end(self) -> StreamEnd | None:
        """Begin all gathers so far and their moves, and return their end; see :class:`BlockCopier`."""
        if self._gathers:
            self._free_moved()
            gathers, self._gathers = self._gathers, []
            plan = GatherPlan.of(gathers)
            has_ids = self._select(plan)
            if not has_ids:
                self._copy_pages(gathers)
            self._waits.move_follows_gathers()
            with self._store_stream:
                descriptors = self._move(plan.slots if has_ids else [(one.start, one.payload) for one in gathers])
            self._moves.append(_Copies(self._store_stream.record_event(), len(gathers), int(has_ids), descriptors))
        return StreamEnd(self._moves[-1].end, self._waits.store_follows_move) if self._moves else None

    def scatter(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> None:
        """Copy blocks from ``payload`` into the KV cache; see :class:`BlockCopier`."""
        check_attached(self._tensors)
        check_slots(layout, blocks)
        self._new_scatters.append(Scatter(layout, blocks, payload))

    def scatters_end(self) -> StreamEnd:
        """Begin all scatters so far, and return their end; see :class:`BlockCopier`."""
        self._free_descriptors()
        scatters, self._new_scatters = self._new_scatters, []
        if not scatters:
            return self._end_of(self._load_stream.record_event())
        self._waits.scatter_follows_engine()
        with self._load_stream:
            descriptors = self._fill(scatters)
        end = self._load_stream.record_event()
        self._scatters.append(_Copies(end, 0, 0, descriptors))
        return self._end_of(end)

    def let_engine_follow_scatters(self) -> None:
        """Let later work of the engine begin after the scatters so far; see :class:`BlockCopier`."""
        self.scatters_end()
        self._waits.engine_follows_scatters()

    def wait(self) -> None:
        """Wait for the end of all copies."""
        self.gathers_end()
        self.scatters_end()
        self._waits.shutdown_follows_copies()

    def detach(self) -> None:
        """Wait for the end of all copies and let go of the KV cache; see :class:`CacheCopier`."""
        self.wait()
        self._free_moved()
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

    def _select(self, plan: GatherPlan) -> bool:
        """Copy pages into the device buffer by one call per selection; false if there is no room for the block ids."""
        there = self._ids.try_put(plan.block_ids)
        if there is None:
            return False
        for run, first_id, objects, pages, start, stride in plan.selections:
            word_bytes = math.gcd(self._alignments[run.tensor_index], run.page_bytes, start)  # a stride is a multiple
            word = _WORDS[word_bytes]
            ids = there[first_id : first_id + objects * pages].view(objects, pages)
            shape = objects, pages, run.page_bytes // word_bytes
            strides = stride // word_bytes, shape[2], 1
            target = self._memory.view(word).as_strided(shape, strides, start // word_bytes)
            torch.ops.aten.index.Tensor_out(self._rows_of(run, word), [ids], out=target)
        return True

    def _rows_of(self, run: PageRun, word: torch.dtype) -> torch.Tensor:
        """Return the pages of all blocks in a reference, as rows of words."""
        rows = self._rows.get((run.tensor_index, run.page_bytes, word))
        if rows is None:
            rows = self._tensors[run.tensor_index][:, : run.page_bytes].view(word)
            self._rows[run.tensor_index, run.page_bytes, word] = rows
        return rows

    def _copy_pages(self, gathers: Sequence[Gather]) -> None:
        """Copy pages into the device buffer by one call per piece."""
        for gather in gathers:
            slot = self._memory[gather.start : gather.start + len(gather.payload)]
            for span in copy_spans(gather.layout, gather.blocks):
                _pages(slot, span).copy_(self._blocks(span))

    def _move(self, slots: Sequence[tuple[int, torch.Tensor]]) -> list[object]:
        """Begin the copies from the device buffer to payloads, on the current stream; return their descriptors."""
        if self._batched_copy is None:
            for start, payload in slots:
                payload.copy_(self._memory[start : start + len(payload)], non_blocking=True)
            return []
        memory = self._memory.data_ptr()
        pieces = CopyPieces.of((memory + start, payload.data_ptr(), len(payload)) for start, payload in slots)
        return [self._batched_copy(pieces, from_host=False)]

    def _fill(self, scatters: Sequence[Scatter]) -> list[object]:
        """Begin the copies from payloads to blocks, on the current stream; return their descriptors."""
        if self._batched_copy is not None:
            return [self._batched_copy(pieces_to_blocks(scatters, self._addresses), from_host=True)]
        for scatter in scatters:
            for span in copy_spans(scatter.layout, scatter.blocks):
                self._blocks(span).copy_(_pages(scatter.payload, span), non_blocking=True)
        return []

    def _end_of(self, scatters: torch.Event) -> StreamEnd:
        return StreamEnd(scatters, self._waits.verdict_follows_scatter)

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
