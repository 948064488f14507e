"""Names of temporary files. Each name identifies its writer, so that leftovers of dead writers can be removed."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from offload_backend_nfs.storage.base import TEMPORARY_LIFE_SECONDS, Entry

_NAME = re.compile(r"(?P<host>[0-9a-f]{16})-(?P<pid>[0-9a-f]{1,16})-((?P<start>[0-9a-f]{1,16})-)?[0-9a-f]{16}\.tmp")
_ENDED_STATES = (b"Z", b"X")


def temporary_name() -> str:
    """Return a name that no other writer uses, on any host."""
    pid = os.getpid()
    return f"{_host_id()}-{pid:x}-{_own_start(pid):x}-{secrets.token_hex(8)}.tmp"


def is_temporary(name: str) -> bool:
    """Return whether a name comes from :func:`temporary_name`."""
    return _NAME.fullmatch(name) is not None


def leftovers(entries: Iterable[Entry], now_seconds: Callable[[], float]) -> Iterator[str]:
    """Yield the temporaries among ``entries`` that have no living writer.

    Args:
        now_seconds: returns the present time by the clock of the storage; called at most once. The clocks of hosts
            and servers may differ by days.
    """
    oldest: float | None = None
    for entry in entries:
        if not is_temporary(entry.name):
            continue
        if writer_is_dead(entry.name):
            yield entry.name
            continue
        if oldest is None:
            oldest = now_seconds() - TEMPORARY_LIFE_SECONDS
        if entry.modified_seconds < oldest:
            yield entry.name


def writer_is_dead(name: str) -> bool:
    """Return whether the writer of a temporary was a process of this host that no longer runs."""
    match = _NAME.fullmatch(name)
    if match is None or match["host"] != _host_id():
        return False
    pid = int(match["pid"], 16)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass
    start = _start(pid)
    # A process id is used again. A zombie writes no more.
    return start is not None and match["start"] is not None and start != int(match["start"], 16)


@functools.lru_cache(maxsize=1)
def _own_start(pid: int) -> int:
    return _start(pid) or 0


def _start(pid: int) -> int | None:
    """Return the start of a process in the kernel's ticks, 0 if it has ended, or ``None`` if that is unknown."""
    try:
        # The name, in parentheses, may contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
        return 0 if fields[0] in _ENDED_STATES else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


@functools.cache
def _host_id() -> str:
    """Return an identity of this host, boot and process-id namespace.

    Containers may share a host name and still have process ids of their own.
    """
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    with suppress(OSError):
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()
