"""Host memory that is pinned piece by piece, and batched copies that cross no border between two pieces.

CUDA lets no other call of the process begin while it pins memory, about 0.4 s for a GiB. So large memory is pinned in
small pieces. But CUDA's batched copy (``cuMemcpyBatchAsync``) refuses a piece of memory that two calls have pinned.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

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
        self._borders: list[int] = []
        self._as_array: npt.NDArray[np.uint64] | None = None
        """The borders; ``None`` after a change."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin a piece; see :meth:`HostPinning.register`."""
        self._pinning.register(address, nbytes)
        with self._lock:
            self._ends[address] = address + nbytes
            for border in (address, address + nbytes):
                place = bisect_left(self._borders, border)
                if self._borders[place : place + 1] != [border]:
                    self._borders.insert(place, border)
            self._as_array = None

    def unregister(self, address: int) -> None:
        """Unpin a piece; see :meth:`HostPinning.unregister`."""
        with self._lock:
            del self._ends[address]
            if not self._ends:  # until then, a border too many costs only a split
                self._borders.clear()
                self._as_array = None
        self._pinning.unregister(address)

    def split(self, pieces: CopyPieces, *, from_host: bool) -> CopyPieces:
        """Return the same copies in pieces that cross no border.

        Args:
            from_host: whether the sources are in host memory, or the targets.
        """
        borders = self._array()
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

    def _array(self) -> npt.NDArray[np.uint64]:
        borders = self._as_array
        if borders is None:
            with self._lock:
                borders = self._as_array = np.array(self._borders, dtype=np.uint64)
        return borders


def _parts(start: int, nbytes: int, borders: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the offset and the bytes of each part of a piece."""
    offset = 0
    for border in borders:
        yield offset, border - start - offset
        offset = border - start
    yield offset, nbytes - offset
