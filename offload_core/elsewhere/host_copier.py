"""Copies between places in another system's host memory and staging memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from offload_core.memory.block_copier import BlockSlice, Bytes, Copy, HostMemoryCopier
from offload_core.memory.payload_layout import PackLayout

PlaceParts = Sequence[memoryview]
"""The bytes of a place in the other system's memory: one or more parts in order, each flat and writable."""
PlaceView = Callable[[int], PlaceParts]
"""Returns the bytes of a place."""


class HostCopier(HostMemoryCopier):
    """Copies for objects that each fill one place.

    An object has one block, whose id is the number of its place. No view of the memory outlives a copy: the other
    system may unmap the memory when all jobs have ended.
    """

    def __init__(self, view_of: PlaceView) -> None:
        super().__init__()
        self._view_of = view_of

    def _copies(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: Bytes) -> Iterator[Copy]:
        ((number,),) = (part.block_ids for part in blocks)
        places = [np.frombuffer(part, np.int8) for part in self._view_of(number)]
        nbytes = sum(map(len, places))
        if nbytes != len(payload):
            raise ValueError(f"place {number} has {nbytes} bytes, and its object {len(payload)}")
        end = 0
        for place in places:
            for first in range(0, len(place), self._part_bytes):
                part = place[first : first + self._part_bytes]
                end += len(part)
                yield payload[end - len(part) : end], part, end
