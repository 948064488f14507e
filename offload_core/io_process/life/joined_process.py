"""An I/O process that another process of the engine has started. Linux only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable


class JoinedProcess:
    """Watches and kills a process that is no child of this one. All methods run on the event loop.

    Args:
        pid: its process id, for log lines.
        descriptor: a pidfd of it, which belongs to this object. It names the process, also when its id has gone on to
            another one.
        on_end: called once with a description, when the process is gone with all of its threads.
    """

    def __init__(self, pid: int, descriptor: int, on_end: Callable[[str], None]) -> None:
        self._pid = pid
        self._descriptor = descriptor
        self._on_end = on_end
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(descriptor, self._gone)

    @property
    def pid(self) -> int | None:
        """The process id; ``None`` after the end."""
        return None if self._is_closed else self._pid

    def kill(self) -> None:
        """Send SIGKILL, and do not wait. Does nothing after the end."""
        if not self._is_closed:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def close(self) -> None:
        """Watch it no more. Harmless when repeated."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)

    def _gone(self) -> None:
        self.close()
        self._on_end("has ended")
