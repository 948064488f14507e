"""Copies between places in another system's host memory and staging memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch

from offload_core.memory.block_copier import BlockSlice
from offload_core.memory.payload_layout import PackLayout

_Bytes: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.int8]]"
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
    in_parts = None
    gather_bytes = math.inf

    def __init__(self, view_of: PlaceView) -> None:
        self._view_of = view_of

    def has_room(self, payload_bytes: int) -> bool:
        """Return ``True``: a gather needs no memory beside the payload."""
        return True

    def gather(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> bool:
        """Copy a place into ``payload``."""
        for part, place in self._parts(blocks, payload):
            np.copyto(part, place)  # lets other threads run, unlike a copy of memoryviews
        return True

    def gathers_end(self) -> None:
        """Return ``None``: the gathers are complete."""

    def scatter(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> None:
        """Copy ``payload`` into a place."""
        for part, place in self._parts(blocks, payload):
            np.copyto(place, part)

    def scatters_end(self) -> None:
        """Return ``None``: the scatters are complete."""

    def let_engine_follow_scatters(self) -> None:
        """Do nothing: the scatters are complete."""

    def wait(self) -> None:
        """Do nothing: the copies are complete."""

    def _parts(self, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> Iterator[tuple[_Bytes, _Bytes]]:
        """Yield each part of the payload, with the part of the place that has its bytes."""
        ((number,),) = (part.block_ids for part in blocks)
        places = [np.frombuffer(part, np.int8) for part in self._view_of(number)]
        ends = list(itertools.accumulate(map(len, places)))
        if ends[-1] != len(payload):
            raise ValueError(f"place {number} has {ends[-1]} bytes, and its object {len(payload)}")
        whole = payload.numpy()
        for place, end in zip(places, ends, strict=True):
            yield whole[end - len(place) : end], place
