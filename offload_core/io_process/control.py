"""The control socket between the engine's process and the I/O process: rare messages, as JSON, with descriptors.

Objects and calls go through the rings (:mod:`offload_core.io_process.protocol`). The socket carries the staging memory,
the making of tiers, and the tidy end. Its end of file tells that the other process is gone. Log records have a socket
of their own.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final

BELLS: Final = ("to_process", "to_engine", "direct_to_process", "direct_to_engine")
"""The names of the doorbells: per lane one for each side."""
JOIN_DESCRIPTORS: Final = ("log", "rings", *BELLS)
"""The descriptors that come with the first message of a process that joins, in this order."""
_MAX_BYTES = 128 * 1024
_MAX_DESCRIPTORS = 8

Record = dict[str, Any]


class ControlSocket:
    """One end of the control socket. Messages keep their borders and their order."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @classmethod
    def pair(cls) -> tuple[ControlSocket, ControlSocket]:
        """Return two connected ends."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), cls(theirs)

    @classmethod
    def from_descriptor(cls, descriptor: int) -> ControlSocket:
        """Take over an end that another process made."""
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        """Return the descriptor; -1 after :meth:`close`."""
        return self._end.fileno()

    def set_blocking(self, blocking: bool) -> None:
        """Choose whether :meth:`send` and :meth:`receive` may wait."""
        self._end.setblocking(blocking)

    def send(self, record: Record, descriptors: Sequence[int] = ()) -> None:
        """Send a record. The other side gets copies of the descriptors.

        Raises:
            ValueError: the record is too large.
            OSError: the other side is gone, or the socket is full and must not wait.
        """
        data = json.dumps(record).encode()
        if len(data) > _MAX_BYTES:
            raise ValueError(f"a control message of {len(data)} bytes is too large; the limit is {_MAX_BYTES}")
        socket.send_fds(self._end, [data], list(descriptors))

    def receive(self) -> tuple[Record, list[int]] | None:
        """Return the next record with its descriptors; ``None`` at the end of file.

        Programs that this process starts do not inherit the descriptors.

        Raises:
            BlockingIOError: there is no record, and the socket must not wait.
            OSError: the other side is gone.
        """
        data, descriptors, _, _ = socket.recv_fds(self._end, _MAX_BYTES, _MAX_DESCRIPTORS)
        if not data:
            return None
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        record = json.loads(data)
        return record, descriptors

    def receive_all(self, take: Callable[[Record, list[int]], object]) -> bool:
        """Give the records that are there to ``take``. The socket must not wait.

        Returns:
            Whether more may come: ``False`` at the end of file, and if the other side is gone.
        """
        try:
            while (received := self.receive()) is not None:
                take(*received)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        """Close this end. Harmless when repeated."""
        self._end.close()
