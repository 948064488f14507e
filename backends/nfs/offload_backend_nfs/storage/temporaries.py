"""Names of temporaries, which tell who writes them, and whether that process is still there."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import secrets
import socket
from contextlib import suppress
from pathlib import Path

_NAME = re.compile(r"(?P<host>[0-9a-f]{16})-(?P<pid>[0-9a-f]{1,16})-[0-9a-f]{16}\.tmp")


def temporary_name() -> str:
    """Return a name that nobody else uses, on any host."""
    return f"{_host()}-{os.getpid():x}-{secrets.token_hex(8)}.tmp"


def is_temporary(name: str) -> bool:
    """Return whether a file was named by :func:`temporary_name`."""
    return _NAME.fullmatch(name) is not None


def is_dead(name: str) -> bool:
    """Return whether the writer of a temporary is known to be gone: a process of this host that does not run."""
    match = _NAME.fullmatch(name)
    if match is None or match["host"] != _host():
        return False
    try:
        os.kill(int(match["pid"], 16), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


@functools.cache
def _host() -> str:
    """Name this host, boot and space of process ids: containers may share a host's name and have ids of their own."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    with suppress(OSError):
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()
