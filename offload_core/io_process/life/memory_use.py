"""The use of shared memory by another process, and by all processes that have it from that one. Linux only.

A process may end while others still map its memory: a backend may have forked, or given the memory to a helper. So the
end of the process alone does not tell that nobody writes any more.
"""

from __future__ import annotations

import fcntl
import os
import struct
from itertools import count

from offload_core.api.memory.shared_memory import SharedMemory

_LOCK = struct.Struct("hhqqi")
"""``struct flock``: type, origin, first byte, number of bytes, process; see fcntl(2)."""
_numbers = count()


class MemoryUse:
    """One other process's use of a memory file.

    Its descriptor is an open file description of its own, with a lock on one byte. Mappings, forks and passed
    descriptors share the description. The kernel drops the lock with the last of them (fcntl_locking(2), "open file
    description locks"; mmap(2) on the reference that a mapping holds).

    Args:
        memory: stays open as long as this object is used.

    Raises:
        OSError: the system has no descriptor left, or no ``/proc``.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._byte = next(_numbers)
        self.descriptor = os.open(f"/proc/self/fd/{memory.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        """The descriptor for the other process."""
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_OFD_SETLK, self._lock())
        except BaseException:
            os.close(self.descriptor)
            raise

    def sent(self) -> None:
        """Close the descriptor, once the other process has it or will never get it. Call it once."""
        os.close(self.descriptor)

    def has_ended(self) -> bool:
        """Return whether no other process has the memory any more, or it was closed here.

        Call it after :meth:`sent`.
        """
        return self._memory.descriptor < 0 or self._found_lock() == fcntl.F_UNLCK

    def _found_lock(self) -> int:
        found = fcntl.fcntl(self._memory.descriptor, fcntl.F_OFD_GETLK, self._lock())
        kind, *_ = _LOCK.unpack(found)
        return int(kind)

    def _lock(self) -> bytes:
        return _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, self._byte, 1, 0)
