"""Copies between places in another system's host memory and staging memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from offload_core.memory.block_copier import COPY_BYTES, BlockSlice, Copy, OnPart, PartCopier, copy_in_parts, to_nobody
from offload_core.memory.payload_layout import PackLayout

PlaceParts = Sequence[memoryview]
"""The bytes of a place in the other system's memory: one or more parts in order, each flat and writable."""
PlaceView = Callable[[int], PlaceParts]
"""Returns the bytes of a place."""


class HostCopier:
    """A :class:`~offload_core.memory.block_copier.BlockCopier` for objects that each fill one place.

    An object has one block, whose id is the number of its place. Each copy is complete when its call returns, and no
    view of the memory outlives it: the other system may unmap the memory when all jobs have ended.
    """

    takes_pageable_memory = takes_pinned_pieces = True
    gather_bytes = math.inf

    def __init__(self, view_of: PlaceView) -> None:
        self._view_of = view_of

    def has_room(self, payload_bytes: int) -> bool:
        """Return ``True``: a gather needs no memory beside the payload."""
        return True

    @property
    def in_parts(self) -> PartCopier:
        """This copier."""
        return self

    def gather(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> bool:
        """Copy a place into ``payload``."""
        return self.gather_in_parts(layout, blocks, payload, to_nobody)

    def gather_in_parts(
        self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor, on_part: OnPart
    ) -> bool:
        """Copy a place into ``payload``, and tell of each part."""
        copy_in_parts(self._copies(blocks, payload), len(payload), COPY_BYTES, on_part, to_payload=True)
        return True

    def gathers_end(self) -> None:
        """Return ``None``: the gathers are complete."""

    def scatter(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> None:
        """Copy ``payload`` into a place."""
        self.scatter_in_parts(layout, blocks, payload, to_nobody)

    def scatter_in_parts(
        self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor, on_part: OnPart
    ) -> None:
        """Copy ``payload`` into a place, and tell of each part."""
        copy_in_parts(self._copies(blocks, payload), len(payload), COPY_BYTES, on_part, to_payload=False)

    def scatters_end(self) -> None:
        """Return ``None``: the scatters are complete."""

    def let_engine_follow_scatters(self) -> None:
        """Do nothing: the scatters are complete."""

    def wait(self) -> None:
        """Do nothing: the copies are complete."""

    def _copies(self, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> Iterator[Copy]:
        """Yield parts of the payload, each with the bytes of the place, and with its end in the payload."""
        ((number,),) = (part.block_ids for part in blocks)
        places = [np.frombuffer(part, np.int8) for part in self._view_of(number)]
        nbytes = sum(map(len, places))
        if nbytes != len(payload):
            raise ValueError(f"place {number} has {nbytes} bytes, and its object {len(payload)}")
        whole = payload.numpy()
        end = 0
        for place in places:
            for first in range(0, len(place), COPY_BYTES):
                part = place[first : first + COPY_BYTES]
                end += len(part)
                yield whole[end - len(part) : end], part, end
