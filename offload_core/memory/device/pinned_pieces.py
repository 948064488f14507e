"""Host memory that is pinned piece by piece, and batched copies that cross no border between two pieces.

CUDA lets no other call of the process begin while it pins memory, about 0.4 s for a GiB. So large memory is pinned in
small pieces. But CUDA's batched copy (``cuMemcpyBatchAsync``) refuses a piece of memory that two calls have pinned.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import numpy as np

from offload_core.api.memory.pinned_memory import HostPinning
from offload_core.memory.device.batched_copy import BatchedCopy, CopyPieces


class PinnedPieces:
    """A :class:`~offload_core.api.memory.pinned_memory.HostPinning` that remembers the borders. Thread-safe.

    Args:
        pinning: pins each piece.
    """

    def __init__(self, pinning: HostPinning) -> None:
        self._pinning = pinning
        self._lock = threading.Lock()
        self._ends: dict[int, int] = {}
        """The end of each piece, by its start."""
        self._borders = np.empty(0, dtype=np.uint64)

    def register(self, address: int, nbytes: int) -> None:
        """Pin a piece; see :meth:`HostPinning.register`."""
        self._pinning.register(address, nbytes)
        with self._lock:
            self._ends[address] = address + nbytes
            self._note_borders()

    def unregister(self, address: int) -> None:
        """Unpin a piece; see :meth:`HostPinning.unregister`."""
        with self._lock:
            del self._ends[address]
            self._note_borders()
        self._pinning.unregister(address)

    def split(self, pieces: CopyPieces, *, from_host: bool) -> CopyPieces:
        """Return the same copies in pieces that cross no border.

        Args:
            from_host: whether the sources are in host memory, or the targets.
        """
        borders = self._borders
        starts = pieces.sources if from_host else pieces.targets
        first = np.searchsorted(borders, starts, side="right")
        last = np.searchsorted(borders, starts + pieces.sizes, side="left")
        (crossing,) = np.nonzero(first < last)
        if not len(crossing):
            return pieces
        parts = CopyPieces.of(
            (int(pieces.sources[index]) + offset, int(pieces.targets[index]) + offset, nbytes)
            for index in crossing
            for offset, nbytes in _parts(
                int(starts[index]), int(pieces.sizes[index]), borders[first[index] : last[index]].tolist()
            )
        )
        whole = np.delete(np.arange(len(starts)), crossing)
        return CopyPieces(*(np.concatenate([all_[whole], some]) for all_, some in zip(pieces, parts, strict=True)))

    def splitting(self, copy: BatchedCopy) -> BatchedCopy:
        """Return a batched copy whose pieces cross no border."""

        def split_and_copy(pieces: CopyPieces, *, from_host: bool) -> object:
            return copy(self.split(pieces, from_host=from_host), from_host=from_host)

        return split_and_copy

    def _note_borders(self) -> None:
        self._borders = np.array(sorted({*self._ends, *self._ends.values()}), dtype=np.uint64)


def _parts(start: int, nbytes: int, borders: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the offset and the bytes of each part of a piece."""
    offset = 0
    for border in borders:
        yield offset, border - start - offset
        offset = border - start
    yield offset, nbytes - offset
