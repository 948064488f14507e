"""The entry of the child process: ``python -m offload_backend_nixl.child SOCKET MEMORY PARENT``."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import sys

from offload_backend_nixl.child.server import serve

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve the parent over the two descriptors that it passed."""
    socket_descriptor, memory_descriptor, parent = map(int, sys.argv[1:])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # it died before the line above
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they reach the whole group; the parent closes the socket, or kills
    connection = socket.socket(fileno=socket_descriptor)
    memory = mmap.mmap(memory_descriptor, 0)
    os.close(memory_descriptor)
    with contextlib.suppress(ConnectionError):  # the parent has closed its end
        serve(connection, memory)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # transfers may be in progress, and NIXL's threads need not end
