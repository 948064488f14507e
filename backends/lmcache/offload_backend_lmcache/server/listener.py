"""The module's own socket: it accepts connections, bounds their number, and runs each on a thread.

Clients without the token take no connection from the others: before its proof, a connection has a place of its own.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from functools import partial

from offload_backend_lmcache.server.config import ServerConfig
from offload_backend_lmcache.server.object_store import ObjectStore
from offload_backend_lmcache.server.session import Session
from offload_backend_lmcache.wire.frames import ProtocolError
from offload_backend_lmcache.wire.streams import Stream

logger = logging.getLogger(__name__)

LONGEST_TRANSFER_SECONDS = 200.0  # LMCache's own locks end after 300 and 600 s
_CLOSE_SECONDS = 5.0
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class Listener:
    """Serves a store on the address of the config, from construction until :meth:`close`.

    Raises:
        OSError: the address cannot be bound.
        ValueError: the token's variable is not set.
    """

    def __init__(self, store: ObjectStore, config: ServerConfig) -> None:
        self._store = store
        self._config = config
        self._token = config.token()
        self._lock = threading.Lock()
        self._streams: dict[Stream, threading.Thread] = {}
        self._unproved: dict[Stream, None] = {}
        """The connections whose client has not proved yet that it knows the token, the oldest first."""
        self._proved: set[Stream] = set()
        self._closed = False
        host, port = config.server
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise OSError(
                error.errno, f"offload-core's module cannot listen on {config.address}: {error.strerror}"
            ) from error
        self._acceptor = threading.Thread(target=self._accept, name="offload-accept", daemon=True)
        self._acceptor.start()

    @property
    def connections(self) -> int:
        """The number of open connections."""
        with self._lock:
            return len(self._streams)

    def close(self) -> None:
        """End all connections and wait a few seconds for their threads. Harmless when repeated."""
        with self._lock:
            self._closed = True
            streams = dict(self._streams)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends a blocked accept
        self._socket.close()
        for stream in streams:
            stream.shut_down()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in (self._acceptor, *streams.values()):
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        is_short = False  # of open files, memory or threads; a later connection may succeed
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if not self._closed:
                    _warn_once(is_short, error)
                    is_short = True
                    time.sleep(0.1)
                continue
            try:
                self._begin(connection)
                is_short = False
            except Exception as error:
                connection.close()
                _warn_once(is_short, error)
                is_short = True

    def _begin(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        stream = Stream(connection, self._config.transfer_seconds, LONGEST_TRANSFER_SECONDS)
        session = Session(stream, self._store, self._config, self._token, partial(self._admit, stream))
        thread = threading.Thread(target=self._run, args=(session, stream), name="offload-session", daemon=True)
        self._end_oldest_unproved()
        with self._lock:
            if self._closed:
                connection.close()
                return
            thread.start()  # first, since it may fail; its end waits for the lock
            self._streams[stream] = thread
            self._unproved[stream] = None

    def _end_oldest_unproved(self) -> None:
        """Make room for one more connection without a proof. There are as many places as for those with one."""
        with self._lock:
            if len(self._unproved) < self._config.max_connections:
                return
            oldest = next(iter(self._unproved))
            del self._unproved[oldest]
            thread = self._streams[oldest]
        oldest.shut_down()
        thread.join(_CLOSE_SECONDS)  # it only waits for its stream, so it ends at once

    def _admit(self, stream: Stream) -> bool:
        """Take the connection of a client with the token, if fewer than the limit are open."""
        with self._lock:
            is_open = stream in self._unproved
            self._unproved.pop(stream, None)
            has_room = is_open and len(self._proved) < self._config.max_connections
            if has_room:
                self._proved.add(stream)
            return has_room

    def _run(self, session: Session, stream: Stream) -> None:
        try:
            session.run()
        except ProtocolError as error:
            logger.warning("offload-core's module ends a connection: %s", error)
        except OSError as error:
            logger.debug("offload-core's module lost a connection: %s", error)
        except Exception:
            logger.exception("offload-core's module ends a connection because of an error")
        finally:
            with self._lock:
                del self._streams[stream]
                self._unproved.pop(stream, None)
                self._proved.discard(stream)
            stream.close()


def _warn_once(has_warned: bool, error: Exception) -> None:
    if not has_warned:
        logger.warning("offload-core's module cannot serve a new connection: %s", error)
