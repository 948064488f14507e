"""The place where the processes of one engine find their I/O process. Linux only.

It is a socket whose name is in no file system, so nothing is left of it after the I/O process, however that ends.
The process of the engine that comes first gets the socket, and starts the I/O process with it. The others connect.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import struct
import sys
from collections.abc import Mapping
from typing import Any

from offload_core.io_process import protocol

_BACKLOG = 128
_CREDENTIALS = struct.Struct("3i")  # process, user and group of the other side, see unix(7)


class MeetingPoint:
    """Names of sockets, the same in all processes of an engine on this host.

    Args:
        name: unique for the engine.
        keys: the configuration. Processes with other configurations do not meet.
    """

    def __init__(self, name: str, keys: Mapping[str, Any]) -> None:
        sameness = [name, os.getuid(), protocol.VERSION, sys.prefix, keys]
        text = json.dumps(sameness, sort_keys=True, default=str)  # a script may pass paths
        self._name = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def name(self) -> str:
        """A name that only the processes that meet here have."""
        return self._name

    def try_listen(self, generation: int) -> socket.socket | None:
        """Return a listening socket, or ``None`` if another process has it already.

        Args:
            generation: number of I/O processes before it that have ended only in part, and have their sockets still.

        Raises:
            OSError: the system allows no such socket, or no pidfd, which the others would need.
        """
        os.close(os.pidfd_open(os.getpid()))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(self._address(generation))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                return None
            raise
        return listener

    def connect(self, generation: int) -> socket.socket | None:
        """Connect to the process that has the socket, without a wait. ``None`` if nobody listens.

        Raises:
            PermissionError: the socket belongs to another user.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        try:
            connection.connect(self._address(generation))
            if not is_own_user(connection):
                raise PermissionError("another user has the socket of this engine's I/O process")
        except (ConnectionError, BlockingIOError):
            connection.close()
            return None
        except BaseException:
            connection.close()
            raise
        return connection

    def _address(self, generation: int) -> bytes:
        return f"\0offload-core/{self._name}/{generation}".encode()


def is_own_user(connection: socket.socket) -> bool:
    """Return whether the other side of a Unix socket belongs to this process's user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.getuid())
