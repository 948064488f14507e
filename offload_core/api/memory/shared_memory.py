"""Anonymous memory that several processes map. Linux only.

The memory is a file without a name in any file system. The kernel frees it with the last process that has it,
however that process ends.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from typing import ClassVar
from weakref import WeakValueDictionary

from offload_core.api.memory.addresses import address_of


class SharedMemory:
    """A memory file of fixed size, and its mapping in this process.

    A process that shrinks a mapped file kills every reader of the lost pages by SIGBUS. Seals on the file forbid that,
    so a peer cannot end this process by resizing the memory. The kernel provides the pages at the first use of each.

    One thread calls :meth:`create`, :meth:`from_descriptor` and :meth:`close`; any thread may use the view.
    """

    _open: ClassVar[WeakValueDictionary[int, SharedMemory]] = WeakValueDictionary()
    _open_lock = threading.Lock()

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._mapping: mmap.mmap | None = mmap.mmap(descriptor, nbytes)
        self._view: memoryview | None = memoryview(self._mapping)
        self._nbytes = nbytes
        self._descriptor = descriptor
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        with self._open_lock:
            self._open[self._address] = self

    @classmethod
    def create(cls, name: str, nbytes: int) -> SharedMemory:
        """Make a memory file of zeros, and map it.

        Args:
            name: shown in ``/proc/PID/maps`` and ``/proc/PID/fd``; several files may have the same name.
            nbytes: size, fixed from now on.

        Raises:
            ValueError: ``nbytes`` is not positive.
            OSError: the system has no descriptor or no address space left.
        """
        if nbytes <= 0:
            raise ValueError(f"shared memory {name!r} of {nbytes} bytes cannot be made; the size must be positive")
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, nbytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(descriptor, nbytes)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def from_descriptor(cls, descriptor: int) -> SharedMemory:
        """Map a memory file that another process made, and take over its descriptor.

        After an error the descriptor is still the caller's. Otherwise :meth:`close` closes it, and programs that this
        process starts do not inherit it.

        Raises:
            ValueError: the descriptor is no memory file, is empty, or is not sealed against shrinking.
            OSError: the descriptor is closed, or the file cannot be mapped for reading and writing.
        """
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            raise ValueError(f"descriptor {descriptor} is no memory file; pass one from memfd_create") from None
        if not seals & fcntl.F_SEAL_SHRINK:
            raise ValueError(
                f"the memory file of descriptor {descriptor} is not sealed against shrinking, so its other users could"
                " end this process; add F_SEAL_SHRINK"
            )
        nbytes = os.fstat(descriptor).st_size
        if not nbytes:
            raise ValueError(f"the memory file of descriptor {descriptor} is empty; set its size before you pass it")
        memory = cls(descriptor, nbytes)
        os.set_inheritable(descriptor, False)
        return memory

    @classmethod
    def of(cls, buffer: memoryview) -> tuple[SharedMemory, int] | None:
        """Return the open shared memory that contains a buffer, and the buffer's offset there, or ``None``.

        In an I/O process, the buffers of loads and stores lie in staging memory. A backend may pass its descriptor to a
        process of its own, which maps it. If the I/O process dies, the engine does not use the memory of a call again
        while such a process has it. So pass this descriptor, and do not open the file anew.

        Nobody may touch a buffer after the end of its call. A call whose process hangs must therefore wait for the end
        of that process.
        """
        start = address_of(buffer)
        with cls._open_lock:
            memories = list(cls._open.values())
        for memory in memories:
            offset = start - memory._address
            if offset >= 0 and offset + buffer.nbytes <= memory.nbytes and buffer.nbytes:
                return memory, offset
        return None

    @property
    def view(self) -> memoryview:
        """The memory, writable byte by byte.

        Raises:
            ValueError: the memory is closed.
        """
        if self._view is None:
            raise ValueError("the shared memory is closed; take its view before")
        return self._view

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self._nbytes

    @property
    def descriptor(self) -> int:
        """The file's descriptor, for another process; -1 after :meth:`close`."""
        return self._descriptor

    def close(self) -> None:
        """Give up the mapping and close the descriptor. Harmless when repeated.

        Views that others still hold stay valid: the mapping ends with the last of them. The thread that drops the last
        one unmaps the memory, which takes about 0.1 s for each GiB that was in use.
        """
        if self._mapping is not None:
            with self._open_lock:
                self._open.pop(self._address, None)
            self._view = self._mapping = None
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)
