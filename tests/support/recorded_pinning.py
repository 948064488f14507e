"""A pinning that records the pinned pieces, in place of a GPU's."""

from __future__ import annotations

import threading


class RecordedPinning:
    """Fails after ``limit`` pieces.

    Args:
        all_bytes: bytes of the memory that is to be pinned.

    Attributes:
        pinned: the bytes of each pinned piece, by its address.
        may_go_on: while it is not set, calls in the background wait.
        all_are_pinned: set once all bytes are.
        has_failed: set after the first error.
    """

    def __init__(self, limit: int = 1000, all_bytes: int = 0) -> None:
        self.limit = limit
        self._all_bytes = all_bytes
        self.pinned: dict[int, int] = {}
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.all_are_pinned = threading.Event()
        self.has_failed = threading.Event()

    def register(self, address: int, nbytes: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert self.may_go_on.wait(30)
        if len(self.pinned) == self.limit:
            self.has_failed.set()
            raise OSError("no more can be pinned")
        assert address not in self.pinned
        self.pinned[address] = nbytes
        if sum(self.pinned.values()) == self._all_bytes:
            self.all_are_pinned.set()

    def unregister(self, address: int) -> None:
        del self.pinned[address]
