"""The connections of a tier: few, kept open, and replaced when the server was restarted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from offload_backend_lmcache.client import problems
from offload_backend_lmcache.client.connection import Connection, RequestError, Target

T = TypeVar("T")


class ConnectionPool:
    """Connections to one server. Thread-safe; each call takes a connection for itself.

    Args:
        target: the server.
        max_idle: number of connections that are kept open while no call uses them.
    """

    def __init__(self, target: Target, max_idle: int) -> None:
        self._target = target
        self._max_idle = max_idle
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._closed = False

    def call(self, work: Callable[[Connection], T]) -> T:
        """Run ``work`` with a connection.

        If a kept connection turns out to be broken, ``work`` is repeated once, with a new connection. A time-out is
        never repeated.

        Raises:
            OSError: with the address and the cure.
        """
        kept = self._take()
        if kept is not None:
            try:
                return self._use(kept, work)
            except ConnectionError:
                self.drop_idle()  # they are as old as the broken one
        connection = Connection(self._target)
        try:
            return self._use(connection, work)
        except ConnectionError as error:
            raise problems.lost(self._target.address, error) from error

    def drop_idle(self) -> None:
        """Close the connections that no call uses."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def close(self) -> None:
        """Close the connections, those in use at the end of their calls. Harmless when repeated."""
        with self._lock:
            self._closed = True
        self.drop_idle()

    def _use(self, connection: Connection, work: Callable[[Connection], T]) -> T:
        try:
            result = work(connection)
        except RequestError:
            self._give_back(connection)
            raise
        except TimeoutError as error:
            connection.close()
            self.drop_idle()  # they have the same way, and each would cost another time-out
            raise problems.lost(self._target.address, error) from error
        except BaseException:
            connection.close()
            raise
        self._give_back(connection)
        return result

    def _take(self) -> Connection | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if connection.is_usable():
                return connection
            connection.close()

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < self._max_idle:
                self._idle.append(connection)
                return
        connection.close()
