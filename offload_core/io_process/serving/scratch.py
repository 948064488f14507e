"""Memory in the I/O process: pieces of the engine's staging memory, in the place of leases."""

from __future__ import annotations

from collections.abc import Sequence


class MappedPiece:
    """A piece of mapped memory in the place of a lease. The engine's process releases the lease itself."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.nbytes = len(view)

    def release(self) -> None:
        """Do nothing."""


class CallScratch:
    """Memory for compressed objects of one call: the pieces that came with it, and for loads private memory.

    The parts of a call take pieces in any order. A piece came for each object, so there is one for every object as long
    as nobody takes a larger piece than it needs.
    """

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self._unused = sorted(pieces, key=len)

    def try_scratch_for_store(self, nbytes: int) -> MappedPiece | None:
        """Return the smallest unused piece of at least ``nbytes`` bytes."""
        for index, view in enumerate(self._unused):
            if len(view) >= nbytes:
                del self._unused[index]
                return MappedPiece(view[:nbytes])
        return None

    def try_scratch_for_load(self, nbytes: int) -> MappedPiece:
        """Return new memory of this process."""
        return MappedPiece(memoryview(bytearray(nbytes)))
