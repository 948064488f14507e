"""Copies between places in another system's host memory and staging memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from offload_core.memory.block_copier import BlockSlice
from offload_core.memory.payload_layout import PackLayout

PlaceView = Callable[[int], memoryview]
"""Returns the bytes of a place in the other system's memory, flat and writable."""


class HostCopier:
    """A :class:`~offload_core.memory.block_copier.BlockCopier` for objects that each fill one place.

    An object has one block, whose id is the number of its place. Each copy is complete when its call returns, and no
    view of the memory outlives it: the other system may unmap the memory when all jobs have ended.
    """

    takes_pageable_memory = True

    def __init__(self, view_of: PlaceView) -> None:
        self._view_of = view_of

    def gather(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> bool:
        """Copy a place into ``payload``."""
        np.copyto(payload.numpy(), self._bytes(blocks))  # lets other threads run, unlike a copy of memoryviews
        return True

    def gathers_end(self) -> None:
        """Return ``None``: the gathers are complete."""

    def scatter(self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor) -> None:
        """Copy ``payload`` into a place."""
        np.copyto(self._bytes(blocks), payload.numpy())

    def scatters_end(self) -> None:
        """Return ``None``: the scatters are complete."""

    def let_engine_follow_scatters(self) -> None:
        """Do nothing: the scatters are complete."""

    def wait(self) -> None:
        """Do nothing: the copies are complete."""

    def _bytes(self, blocks: Sequence[BlockSlice]) -> np.ndarray[tuple[int, ...], np.dtype[np.int8]]:
        ((place,),) = (part.block_ids for part in blocks)
        return np.frombuffer(self._view_of(place), np.int8)
