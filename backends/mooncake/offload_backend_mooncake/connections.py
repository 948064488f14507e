"""The Mooncake clients of this process: one per cluster, shared by its tiers.

A client that nobody uses is closed a few seconds later, and all are closed when the interpreter ends. Closing takes a
second, and crashes the process if a call is under way. The process would also crash if its end met a running call.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import threading
import time

from offload_backend_mooncake.client import Client, Cluster

logger = logging.getLogger(__name__)

IDLE_SECONDS = 10.0
"""Time for which a client without tiers stays open."""
EXIT_LIMIT_SECONDS = 70.0
"""Longest wait for running calls at the end of the interpreter: Mooncake ends each call after 60 s."""


class _Entry:
    """A client and the number of tiers that use it."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.users = 0
        self.closing: threading.Timer | None = None


_lock = threading.Lock()
_entries: dict[Cluster, _Entry] = {}
_used = False
_forked_from_user = False
_of_the_parent: list[dict[Cluster, _Entry]] = []


def acquire(cluster: Cluster, tier: str) -> Client:
    """Return this process's client of a cluster, connected. Blocks; :func:`release` it afterwards.

    Raises:
        OSError: there is no connection, or the process was forked from one that had a connection.
    """
    global _used
    if _forked_from_user:
        raise OSError(
            errno.ENOTSUP,
            f"{cluster}: this process was forked from one that uses Mooncake, and Mooncake's threads do not survive "
            "that; start the process by spawn, or open the tier in the parent later",
        )
    with _lock:
        _used = True
        entry = _entries.get(cluster)
        if entry is None:
            entry = _entries[cluster] = _Entry(Client(cluster))
        if entry.closing is not None:
            entry.closing.cancel()
            entry.closing = None
        entry.users += 1
    try:
        entry.client.connect(tier)
    except BaseException:
        release(entry.client)
        raise
    return entry.client


def release(client: Client) -> None:
    """Give a client back. The last release closes it after a while, in the background. Never blocks."""
    with _lock:
        entry = _entries.get(client.cluster)
        if entry is None or entry.client is not client:
            return  # a fork or the end of the interpreter has taken it away
        entry.users -= 1
        if entry.users == 0:
            entry.closing = threading.Timer(IDLE_SECONDS, _close_if_idle, [entry])
            entry.closing.daemon = True
            entry.closing.name = f"close {client.cluster.master}"
            entry.closing.start()


def _close_if_idle(entry: _Entry) -> None:
    with _lock:
        if entry.users or _entries.get(entry.client.cluster) is not entry:
            return
        del _entries[entry.client.cluster]
    entry.client.close(EXIT_LIMIT_SECONDS)


def _close_all() -> None:
    """Close all clients at the end of the interpreter, each after its last call."""
    with _lock:
        clients = [entry.client for entry in _entries.values()]
        _entries.clear()
    limit = time.monotonic() + EXIT_LIMIT_SECONDS
    for client in clients:
        client.refuse_calls()
    for client in clients:
        if not client.close(limit - time.monotonic()):
            logger.warning("%s: calls still run at the end of the process", client.cluster)


def _forget_after_fork() -> None:
    """Leave the parent's clients alone: their threads do not exist here, and closing them would hang."""
    global _lock, _forked_from_user
    _forked_from_user = _used
    _lock = threading.Lock()
    _of_the_parent.append(dict(_entries))
    _entries.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_after_fork)
