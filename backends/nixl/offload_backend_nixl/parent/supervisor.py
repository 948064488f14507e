"""The child process of a tier: it is started when it is needed, and replaced after its end."""

from __future__ import annotations

import errno
import secrets
import threading
import time
from collections.abc import Mapping
from typing import Any

from offload_backend_nixl.parent.connection import Child
from offload_core.api import TierLogger

_MIN_PAUSE_SECONDS = 0.25
_MAX_PAUSE_SECONDS = 10.0
_LAST_ANSWERS_SECONDS = 2.0
"""Time for a child to answer its last requests, before another is started beside it."""
_MAX_HUNG = 2
"""While so many ended children are not gone, no other is started: it would hang too."""


class Supervisor:
    """The owner of the child process. All methods may block, and run on any thread.

    Args:
        name: the tier's name, for error messages.
        log: the tier's logger.
        ring_bytes: size of the memory that is shared with each child.
        settings: the configuration of each child.
        deadline_seconds: limit on an answer of a child.
    """

    def __init__(
        self, name: str, log: TierLogger, ring_bytes: int, settings: Mapping[str, Any], deadline_seconds: float
    ) -> None:
        self._name = name
        self._log = log
        self._ring_bytes = ring_bytes
        self._settings = {**settings, "writer": secrets.token_hex(8)}
        self._deadline_seconds = deadline_seconds
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._not_gone: list[Child] = []
        self._failures = 0
        self._next_start_seconds = float("-inf")
        self._closed = threading.Event()

    @property
    def pid(self) -> int | None:
        """The child process, while it lives."""
        return None if self._child is None else self._child.pid

    def open(self) -> None:
        """Start the first child, which creates the folder of the objects if it is missing.

        Raises:
            OSError: the medium or NIXL cannot be used.
        """
        with self._lock:
            self._start(create=True)

    def child(self) -> Child:
        """Return a child that lives, and start one if there is none.

        Raises:
            OSError: there is none, and none can be started now.
        """
        child = self._child
        if child is not None and not child.has_ended:
            return child
        if not self._lock.acquire(timeout=self._deadline_seconds):
            raise OSError(errno.EAGAIN, f"the NIXL process of tier {self._name!r} is still starting")
        try:
            if self._child is None or self._child.has_ended:
                self._replace()
            assert self._child is not None
            return self._child
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the child. Harmless when repeated, and before :meth:`open`."""
        self._closed.set()
        child = self._child
        if child is not None:
            child.close()

    def _replace(self) -> None:
        if self._child is not None:
            ended, self._child = self._child, None
            self._failures = 0 if ended.has_answered else self._failures + 1
            self._pause()
            ended.wait_gone(_LAST_ANSWERS_SECONDS)
            self._log.warning("the NIXL process ended: %s; another is started", ended.reason)
        self._not_gone = [child for child in self._not_gone if not child.is_gone]
        if len(self._not_gone) >= _MAX_HUNG:
            raise OSError(
                errno.EAGAIN,
                f"the NIXL processes of tier {self._name!r} hang in the medium and cannot be ended; see the mount",
            )
        if time.monotonic() < self._next_start_seconds:
            raise OSError(errno.EAGAIN, f"the NIXL process of tier {self._name!r} ended; another is started soon")
        try:
            self._start(create=False)
        except OSError:
            self._failures += 1
            self._pause()
            raise

    def _pause(self) -> None:
        """Wait longer before the next start after each failure in a row, and not at all without a failure."""
        pause = min(_MIN_PAUSE_SECONDS * 2 ** (self._failures - 1), _MAX_PAUSE_SECONDS) if self._failures else 0.0
        self._next_start_seconds = time.monotonic() + pause

    def _start(self, create: bool) -> None:
        if self._closed.is_set():
            raise OSError(errno.EBADF, f"tier {self._name!r} is closed")
        child = Child(self._name, self._ring_bytes, {**self._settings, "create": create}, self._deadline_seconds)
        self._not_gone.append(child)
        child.start()
        self._child = child
        if self._closed.is_set():  # closed meanwhile
            child.close()
