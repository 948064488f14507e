"""The memory that a tier in the I/O process lends, mapped in this process, and pinned if a device copies to it."""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable

from offload_core.api.memory.addresses import address_of
from offload_core.api.memory.pinned_memory import HostPinning
from offload_core.api.memory.shared_memory import SharedMemory
from offload_core.tiers.storage import StorageAwayError

logger = logging.getLogger(__name__)

PIECE_BYTES = 16 * 1024 * 1024
"""Size of a piece that is pinned by one call. CUDA lets no other call of the process begin meanwhile."""
_PAUSE = 2.0
"""Pause after each piece, in units of the time that it took, in which the engine's calls begin."""


class LentMapping:
    """Lent memory of one tier. Thread-safe.

    Pinning takes seconds for large memory, so it runs on a thread of its own, piece by piece. The memory stays pinned
    and mapped until it is closed and nobody uses an object in it. A failure is logged.

    Args:
        memory: becomes this object's own.
        may_be_pinned: whether the backend allows it.
        label: the words for the tier in log lines.
    """

    def __init__(self, memory: SharedMemory, *, may_be_pinned: bool, label: str) -> None:
        self._memory = memory
        self.view = memory.view
        """All of the memory, writable."""
        self._may_be_pinned = may_be_pinned
        self._label = label
        self._lock = threading.Condition()
        """Notified when the memory is closed and unused."""
        self._users = 0
        self._is_closed = False
        self._is_pinned = False
        self._pins: threading.Thread | None = None

    @property
    def is_pinned(self) -> bool:
        """True if all of the memory is pinned."""
        return self._is_pinned

    def pin(self, pinning: HostPinning) -> None:
        """Begin to pin the memory. Later calls have no effect, unless there was no descriptor or thread for it."""
        with self._lock:
            if not self._may_be_pinned or self._pins is not None or self._is_closed:
                return
            try:
                descriptor = os.dup(self._memory.descriptor)  # it may be closed meanwhile
            except OSError as error:
                self._not_pinned(error, "raise the limit of open files (ulimit -n)")
                return
            pins = threading.Thread(
                target=self._hold_pinned, args=(pinning, descriptor), name="offload-pin", daemon=True
            )
            try:
                pins.start()
            except RuntimeError as error:  # no thread can be started
                os.close(descriptor)
                self._not_pinned(error, "raise the limit of threads (ulimit -u, or pids.max)")
            else:
                self._pins = pins

    def use(self, give_back: Callable[[], None]) -> Callable[[], None]:
        """Note that the process uses an object. Call the returned function once for its end; it calls ``give_back``.

        Raises:
            StorageAwayError: the memory is closed, so that it may be unpinned. It was given back.
        """
        with self._lock:
            is_closed = self._is_closed
            self._users += not is_closed
        if is_closed:
            give_back()
            raise StorageAwayError(f"{self._label}: its memory is not lent any more")

        def end() -> None:
            give_back()
            with self._lock:
                self._users -= 1
                self._lock.notify_all()

        return end

    def close(self) -> None:
        """Give the memory up. It stays pinned and mapped for objects that are still in use."""
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
        self._memory.close()

    def _not_pinned(self, error: Exception, cure: str) -> None:
        logger.warning(
            "%s: its memory is not pinned, so a GPU copies its objects through staging memory: %s; %s, or set pin to "
            "off", self._label, error, cure,
        )  # fmt: skip

    def _hold_pinned(self, pinning: HostPinning, descriptor: int) -> None:
        """Pin the memory, and unpin it when it is closed and unused."""
        view = self.view  # keeps the memory mapped
        start, addresses = address_of(view), list[int]()
        try:
            for offset in range(0, len(view), PIECE_BYTES):
                began, nbytes = time.monotonic(), min(PIECE_BYTES, len(view) - offset)
                if self._is_closed:
                    break
                os.posix_fallocate(descriptor, offset, nbytes)
                pinning.register(start + offset, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
                addresses.append(start + offset)
                with self._lock:
                    self._lock.wait_for(lambda: self._is_closed, _PAUSE * (time.monotonic() - began))
            else:
                self._is_pinned = True
        except (OSError, RuntimeError) as error:  # torch's own errors too
            self._not_pinned(error, "lower the tier's capacity")
        else:
            with self._lock:
                self._lock.wait_for(lambda: self._is_closed and not self._users)
            self._is_pinned = False
        os.close(descriptor)
        for address in reversed(addresses):
            try:
                pinning.unregister(address)
            except OSError as error:
                logger.warning("%s: %s; its memory stays pinned until the process ends", self._label, error)
                return
