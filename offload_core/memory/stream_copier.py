"""Copies of KV cache blocks on an accelerator, by streams of their own.

- A gather copies blocks into a buffer on the device, on the engine's stream. So later work may reuse the blocks at
  once, and no work waits for the bus. The store stream then moves the buffer to host memory.
- A scatter copies host memory into blocks on the load stream, after all work that is on the engine's stream by then.

:mod:`offload_core.memory.stream_waits` has the waits between the streams. Copies between host and device are torch's,
or batched ones where the engine's installation has them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload_core.memory.batched_copy import BatchedCopy, CopyPieces
from offload_core.memory.block_copier import BlockSlice, CopySpan, check_attached, copy_spans
from offload_core.memory.canonical import CanonicalKVCaches
from offload_core.memory.device_buffer import DeviceBuffer
from offload_core.memory.payload_layout import PackLayout
from offload_core.memory.stream_waits import StreamWaits


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
        descriptors: the descriptors that the device reads meanwhile.
    """

    end: torch.Event
    slots: int
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

    Raises:
        ValueError: the tensors are on several devices.
    """

    takes_pageable_memory = False

    def __init__(self, caches: CanonicalKVCaches, buffer_bytes: int, batched_copy: BatchedCopy | None = None) -> None:
        self._tensors: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._strides: list[int] = []
        self.attach(caches)
        self._device = self._tensors[0].device
        self._memory = torch.empty(buffer_bytes, dtype=torch.int8, device=self._device)
        self._buffer = DeviceBuffer(buffer_bytes)
        self._batched_copy = batched_copy
        self._gathered: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Per gather whose move has not begun, its slot and its payload."""
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
        spans = list(copy_spans(layout, blocks))  # before the slot: an error must not leave it without its move
        self._free_moved()
        start = self._buffer.try_take(len(payload))
        if start is None:
            return False
        slot = self._memory[start : start + len(payload)]
        for span in spans:
            _pages(slot, span).copy_(self._blocks(span))
        self._gathered.append((slot, payload))
        return True

    def gathers_end(self) -> StreamEnd | None:
        """Begin the moves of all gathers so far, and return their end; see :class:`BlockCopier`."""
        if self._gathered:
            gathered, self._gathered = self._gathered, []
            self._waits.move_follows_gathers()
            with self._store_stream:
                descriptors = self._move(gathered)
            self._moves.append(_Copies(self._store_stream.record_event(), len(gathered), descriptors))
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
            pieces = CopyPieces.of(self._pieces(copy_spans(layout, blocks), payload.data_ptr()))
            self._descriptors.append(self._batched_copy(pieces, from_host=True))

    def scatters_end(self) -> StreamEnd:
        """Return the end of all scatters so far; see :class:`BlockCopier`."""
        end = self._load_stream.record_event()
        if self._descriptors:
            self._scatters.append(_Copies(end, 0, self._descriptors))
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
        self._tensors, self._addresses, self._strides = [], [], []

    def attach(self, caches: CanonicalKVCaches) -> None:
        """Copy from and to these tensors from now on; see :class:`CacheCopier`."""
        tensors = [tensor.tensor for tensor in caches.tensors]
        devices = {tensor.device for tensor in tensors}
        if len(devices) != 1:
            raise ValueError(f"the KV cache is on several devices ({', '.join(map(str, devices))}); it must be on one")
        self._tensors = tensors
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        self._strides = [tensor.stride(0) for tensor in tensors]

    def _move(self, gathered: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[object]:
        """Begin the copies from the device buffer, on the current stream; return their descriptors."""
        if self._batched_copy is None:
            for slot, payload in gathered:
                payload.copy_(slot, non_blocking=True)
            return []
        pieces = CopyPieces.of((slot.data_ptr(), payload.data_ptr(), len(payload)) for slot, payload in gathered)
        return [self._batched_copy(pieces, from_host=False)]

    def _free_moved(self) -> None:
        """Free the slots whose bytes are in host memory, in the order in which they were taken."""
        while self._moves and self._waits.gather_follows_move(self._moves[0].end):
            for _ in range(self._moves.popleft().slots):
                self._buffer.free_oldest()

    def _free_descriptors(self) -> None:
        """Free the descriptors of the scatters that have ended."""
        while self._scatters and self._waits.descriptors_follow_copy(self._scatters[0].end):
            self._scatters.popleft()

    def _pieces(self, spans: Iterator[CopySpan], payload: int) -> Iterator[tuple[int, int, int]]:
        """Yield the copies of spans as (address in the payload, address in the KV cache, bytes)."""
        for tensor, page_bytes, block_id, blocks, offset in spans:
            source, stride = payload + offset, self._strides[tensor]
            target = self._addresses[tensor] + block_id * stride
            if stride == page_bytes:
                yield source, target, blocks * page_bytes
                continue
            for block in range(blocks):
                yield source + block * page_bytes, target + block * stride, page_bytes

    def _blocks(self, span: CopySpan) -> torch.Tensor:
        return self._tensors[span.tensor_index][span.block_id : span.block_id + span.blocks, : span.page_bytes]


def lowest_priority(device: torch.device) -> int:
    """Return the lowest priority of a stream in torch, which is 0, the default, on all devices but Intel's GPUs."""
    return 1 if device.type == "xpu" else 0


def _pages(payload: torch.Tensor, span: CopySpan) -> torch.Tensor:
    end = span.offset_bytes + span.blocks * span.page_bytes
    return payload[span.offset_bytes : end].view(span.blocks, span.page_bytes)
