"""A doorbell between two processes: one rings, the other wakes up. Linux only."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterable
from pathlib import Path

_KIND = "anon_inode:[eventfd]"


class Doorbell:
    """An eventfd: a counter in the kernel that wakes a thread or an event loop of any process that has it.

    The ringing side first writes its message, then rings. The waiting side calls :meth:`clear`, reads all messages, and
    then waits. In this order no message is overlooked, because a ring after :meth:`clear` ends the wait at once.

    All methods but :meth:`close` may be called on any thread. Call :meth:`close` after the last other call has
    returned: the descriptor may soon belong to another file. Later calls raise ``ValueError``.
    """

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    @classmethod
    def from_descriptor(cls, descriptor: int) -> Doorbell:
        """Use a doorbell that another process made, and take over its descriptor.

        After an error the descriptor is still the caller's. Otherwise :meth:`close` closes it, and programs that this
        process starts do not inherit it.

        Raises:
            ValueError: the descriptor is no doorbell.
            OSError: the descriptor is closed.
        """
        found = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if found != _KIND:
            raise ValueError(f"descriptor {descriptor} is {found!r} and no doorbell; pass the one of Doorbell.fileno()")
        os.set_blocking(descriptor, False)
        os.set_inheritable(descriptor, False)
        doorbell = cls.__new__(cls)
        doorbell._descriptor = descriptor
        return doorbell

    def ring(self) -> None:
        """Wake the waiting side, now or at its next wait. Never waits. Rings before the next :meth:`clear` are one."""
        with contextlib.suppress(BlockingIOError):  # the counter is full: it rings already
            os.eventfd_write(self._descriptor, 1)

    def wait(self, seconds: float) -> bool:
        """Wait for a ring, and return whether there was one. The doorbell keeps ringing until :meth:`clear`."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def clear(self) -> None:
        """Stop the ringing. Call this before you read the messages, not after."""
        with contextlib.suppress(BlockingIOError):  # it does not ring
            os.eventfd_read(self._descriptor)

    def fileno(self) -> int:
        """Return the descriptor, for an event loop or for another process; -1 after :meth:`close`."""
        return self._descriptor

    def close(self) -> None:
        """Close the descriptor. Harmless when repeated."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def wait_for_any(bells: Iterable[Doorbell], seconds: float) -> None:
    """Wait for a ring of any bell, at most ``seconds``. The bells keep ringing until they are cleared.

    A bell that another thread closes meanwhile can end the wait.
    """
    poll = select.poll()
    for bell in bells:
        if (descriptor := bell.fileno()) >= 0:
            poll.register(descriptor, select.POLLIN)
    poll.poll(seconds * 1000)
