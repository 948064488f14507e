"""Copies of KV cache blocks on an accelerator, by streams of their own.

A device runs the work of one stream in its order, and the work of several streams at the same time. The engine's work
is on its *compute stream*, the current stream of the engine thread.

- A gather copies blocks into a buffer on the device, on the compute stream. So later work may reuse the blocks at once,
  and no work waits for the bus. The *store stream* then moves the buffer to host memory.
- A scatter copies host memory into blocks on the *load stream*, after all work that is on the compute stream by then.

Each wait between streams stands in this module, and is made by an event:

====================  ==================  ============================================================================
this work             waits for           or else
====================  ==================  ============================================================================
move to host memory   the gather          the payload has bytes of an earlier gather
gather                moves of its slot   it overwrites bytes that are still to be moved (the host asks before it)
scatter               compute stream      earlier work still reads or writes the blocks, which were free only on paper
work after a verdict  scatters            a late scatter overwrites the blocks of another request
====================  ==================  ============================================================================
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from offload_core.memory.block_copier import BlockSlice, CopySpan, check_attached, copy_spans
from offload_core.memory.canonical import CanonicalKVCaches
from offload_core.memory.device_buffer import DeviceBuffer
from offload_core.memory.payload_layout import PackLayout


class StreamEnd:
    """A :class:`~offload_core.memory.block_copier.CopyEnd` that an event of the device marks."""

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def has_passed(self) -> bool:
        """Return whether the device has reached the event. Never waits."""
        return bool(self._event.query())


class StreamBlockCopier:
    """A :class:`~offload_core.memory.block_copier.CacheCopier` for the memory of one accelerator.

    Payloads should be pinned. The runtime copies pageable memory piece by piece, and the call waits for that.

    The buffer on the device stays while the copier has no KV cache, since vLLM's sleep mode saves it and maps it again.

    Args:
        caches: the KV cache; all of its tensors are on one device.
        buffer_bytes: size of the buffer on the device; at least that of the largest payload. A gather that finds it
            full is refused.

    Raises:
        ValueError: the tensors are on several devices.
    """

    takes_pageable_memory = False

    def __init__(self, caches: CanonicalKVCaches, buffer_bytes: int) -> None:
        self._tensors: list[torch.Tensor] = []
        self.attach(caches)
        self._device = self._tensors[0].device
        self._memory = torch.empty(buffer_bytes, dtype=torch.int8, device=self._device)
        self._buffer = DeviceBuffer(buffer_bytes)
        self._moving: deque[StreamEnd] = deque()
        self._store_stream: Any = torch.Stream(device=self._device)
        self._load_stream: Any = torch.Stream(device=self._device)

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
        self._store_stream.wait_event(self._compute_stream.record_event())
        with self._store_stream:
            payload.copy_(slot, non_blocking=True)
        self._moving.append(StreamEnd(self._store_stream.record_event()))
        return True

    def gathers_end(self) -> StreamEnd | None:
        """Return the end of all gathers so far; see :class:`BlockCopier`."""
        return self._moving[-1] if self._moving else None

    def scatter(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> None:
        """Copy blocks from ``payload`` into the KV cache; see :class:`BlockCopier`."""
        check_attached(self._tensors)
        self._load_stream.wait_event(self._compute_stream.record_event())
        with self._load_stream:
            for span in copy_spans(layout, blocks):
                self._blocks(span).copy_(_pages(payload, span), non_blocking=True)

    def scatters_end(self) -> StreamEnd:
        """Return the end of all scatters so far; see :class:`BlockCopier`."""
        return StreamEnd(self._load_stream.record_event())

    def let_engine_follow_scatters(self) -> None:
        """Let later work of the engine begin after the scatters so far; see :class:`BlockCopier`."""
        self._compute_stream.wait_event(self._load_stream.record_event())

    def wait(self) -> None:
        """Wait for the end of all copies."""
        self._store_stream.synchronize()
        self._load_stream.synchronize()

    def detach(self) -> None:
        """Wait for the end of all copies and let go of the KV cache; see :class:`CacheCopier`."""
        self.wait()
        self._free_moved()
        self._tensors = []

    def attach(self, caches: CanonicalKVCaches) -> None:
        """Copy from and to these tensors from now on; see :class:`CacheCopier`."""
        tensors = [tensor.tensor for tensor in caches.tensors]
        devices = {tensor.device for tensor in tensors}
        if len(devices) != 1:
            raise ValueError(f"the KV cache is on several devices ({', '.join(map(str, devices))}); it must be on one")
        self._tensors = tensors

    @property
    def _compute_stream(self) -> Any:
        return torch.accelerator.current_stream(self._device)

    def _free_moved(self) -> None:
        """Free the slots whose bytes are in host memory, in the order in which they were taken."""
        while self._moving and self._moving[0].has_passed():
            self._moving.popleft()
            self._buffer.free_oldest()

    def _blocks(self, span: CopySpan) -> torch.Tensor:
        return self._tensors[span.tensor_index][span.block_id : span.block_id + span.blocks, : span.page_bytes]


def _pages(payload: torch.Tensor, span: CopySpan) -> torch.Tensor:
    end = span.offset_bytes + span.blocks * span.page_bytes
    return payload[span.offset_bytes : end].view(span.blocks, span.page_bytes)
