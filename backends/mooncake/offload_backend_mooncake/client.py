"""One Mooncake client: its connection, its calls, and its end when no call runs."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from offload_backend_mooncake.addresses import (
    NOT_PRIVATE,
    Endpoint,
    free_port,
    is_private,
    literal,
    own_address,
    parse_endpoint,
    resolve,
)
from offload_backend_mooncake.library import Deadlines, import_mooncake

T = TypeVar("T")

TRANSFERS_AT_ONCE = 2
"""Calls that move objects at the same time. Mooncake has one thread for them, and more calls make them slower."""
_GIVES_UP_SECONDS = 60.0
"""Mooncake's own limit on a call. After it, transfers that the call has queued may still run."""
_SUSPICIOUS_SECONDS = 50.0
_LOCAL_BUFFER_BYTES = 16 * 1024**2


@dataclass(frozen=True)
class Cluster:
    """A cluster, with everything that its client needs.

    Args:
        master: the address of the master.
        metadata: the owners' metadata server, or ``P2PHANDSHAKE``.
        host: this host's address for the owners, ``None`` for the one on the way to the master.
        protocol: ``tcp`` or ``rdma``.
        device: names of RDMA devices.
        deadlines: the limits of waits.
        insecure: public addresses are allowed.
    """

    master: str
    metadata: str
    host: str | None
    protocol: str
    device: str
    deadlines: Deadlines
    insecure: bool

    def __str__(self) -> str:
        return f"Mooncake cluster {self.master}"


class Client:
    """A client of one cluster. Thread-safe; every method but ``refuse_calls`` blocks."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._connecting = threading.Lock()
        self._slots = threading.BoundedSemaphore(TRANSFERS_AT_ONCE)
        self._store: Any = None
        self._running = 0
        self._replacing = False
        self._closed = False
        self.module: Any = None

    def connect(self, tier: str = "") -> None:
        """Connect to the master, unless it is connected. A connection says nothing about the master of this moment.

        Raises:
            OSError: the master or Mooncake's library is not there, or the address is public.
        """
        with self._connecting:
            self._demand_usable()
            endpoint = self._checked_master()
            if self._store is None:
                self.module = import_mooncake(self.cluster.deadlines, self.cluster.protocol, tier)
                store = self._set_up(endpoint)
                with self._changed:
                    if not self._closed:
                        self._store = store
                        return
                store.close()
                self._demand_usable()

    def request(self, call: Callable[[Any], T]) -> T:
        """Call the store for an answer of the master.

        Raises:
            OSError: the client is closed, or Mooncake raised an error.
        """
        with self._use() as store:
            return self._translated(call, store)

    def transfer(self, call: Callable[[Any], Sequence[int]]) -> Sequence[int]:
        """Call the store to move objects. When this returns, nothing uses the call's buffers any more.

        Mooncake gives up after a minute, and its queued transfers would still run when the owner goes on. The client is
        therefore replaced by a new one after such a call, which ends them.

        Raises:
            OSError: as :meth:`request`, or too many calls wait.
        """
        if not self._slots.acquire(timeout=2 * _GIVES_UP_SECONDS):
            raise OSError(errno.EBUSY, f"{self.cluster}: transfers hang; see that all segment owners run")
        failed = False
        try:
            with self._use() as store:
                began, failed = time.monotonic(), True
                codes = self._translated(call, store)
                failed = min(codes, default=0) < 0
                return codes
        finally:
            if failed and time.monotonic() - began >= _SUSPICIOUS_SECONDS:
                self._replace(store)
            self._slots.release()

    def refuse_calls(self) -> None:
        """Let no further call begin."""
        with self._changed:
            self._closed = True

    def close(self, limit_seconds: float) -> bool:
        """Close the store when no call runs. Return whether it is closed."""
        with self._changed:
            self._closed = True
            if not self._changed.wait_for(lambda: self._running == 0 and not self._replacing, max(limit_seconds, 0)):
                return False
            store, self._store = self._store, None
        if store is not None:
            store.close()
        return True

    @contextmanager
    def _use(self) -> Iterator[Any]:
        """Count a call, so that the store is not closed under it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._replacing, _GIVES_UP_SECONDS)
            self._demand_usable()
        if self._store is None:
            self.connect()
        with self._changed:
            self._demand_usable()
            store = self._store
            if store is None or self._replacing:
                raise OSError(errno.ECONNRESET, f"{self.cluster}: the connection is being replaced; try again")
            self._running += 1
        try:
            yield store
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _replace(self, store: Any) -> None:
        """Close a store whose transfers may still run. The next call makes a new one."""
        with self._changed:
            self._changed.wait_for(lambda: not self._replacing)
            if self._store is not store:
                return  # another call has done it
            self._replacing = True
            self._changed.wait_for(lambda: self._running == 0)
        try:
            store.close()
        finally:
            with self._changed:
                self._store = None
                self._replacing = False
                self._changed.notify_all()

    def _demand_usable(self) -> None:
        if self._process != os.getpid():
            raise OSError(errno.EBADF, f"{self.cluster}: connected before a fork; start the process by spawn")
        if self._closed:
            raise OSError(errno.EBADF, f"{self.cluster}: the connection is closed")

    def _translated(self, call: Callable[[Any], T], store: Any) -> T:
        try:
            return call(store)
        except (RuntimeError, TypeError, ValueError) as error:  # as pybind11 translates errors of C++
            raise OSError(errno.EIO, f"{self.cluster}: Mooncake raised {type(error).__name__}: {error}") from error

    def _checked_master(self) -> Endpoint:
        """Return the master's address after a connection to it, since Mooncake's errors tell nothing."""
        endpoint = parse_endpoint(self.cluster.master)
        try:
            addresses = resolve(endpoint)
        except OSError as error:
            raise OSError(error.errno, f"{self.cluster}: no address for {endpoint.host!r}: {error.strerror}") from error
        public = [address for address in addresses if not is_private(address)]
        if public and not self.cluster.insecure:
            raise OSError(errno.EACCES, f"{self.cluster}: {endpoint.host} ({public[0]}) {NOT_PRIVATE}")
        with suppress(OSError):
            socket.create_connection(endpoint, timeout=self.cluster.deadlines.connect_seconds).close()
            return endpoint
        raise OSError(
            errno.ECONNREFUSED,
            f"{self.cluster}: no master answers at {endpoint}; start mooncake_master there, or correct `master`",
        )

    def _set_up(self, endpoint: Endpoint) -> Any:
        host = self.cluster.host or own_address(endpoint)
        address = literal(host)
        if address is not None and not self.cluster.insecure and not is_private(address):
            raise OSError(errno.EACCES, f"{self.cluster}: this host's address {host} {NOT_PRIVATE}; or set `host`")
        try:
            own = Endpoint(host, free_port(host))
        except OSError as error:
            raise OSError(error.errno, f"{self.cluster}: host {host!r} is no address of this host: {error}") from error
        store = self.module.MooncakeDistributedStore()
        cluster = self.cluster
        code = store.setup(
            str(own), cluster.metadata, 0, _LOCAL_BUFFER_BYTES, cluster.protocol, cluster.device, cluster.master
        )
        if code:
            raise OSError(
                errno.EIO,
                f"{cluster}: no connection (code {code}); see that {endpoint} is a mooncake_master of this version, "
                f"and that protocol {cluster.protocol!r} and metadata {cluster.metadata!r} are those of its owners",
            )
        return store
