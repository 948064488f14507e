"""Names of temporary files. Each name identifies its writer, so that leftovers of dead writers can be removed."""

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
    """Return a name that no other writer uses, on any host."""
    return f"{_host_id()}-{os.getpid():x}-{secrets.token_hex(8)}.tmp"


def is_temporary(name: str) -> bool:
    """Return whether a name comes from :func:`temporary_name`."""
    return _NAME.fullmatch(name) is not None


def writer_is_dead(name: str) -> bool:
    """Return whether the writer of a temporary was a process of this host that no longer runs."""
    match = _NAME.fullmatch(name)
    if match is None or match["host"] != _host_id():
        return False
    try:
        os.kill(int(match["pid"], 16), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


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
