"""The kind of file system under a folder, as the kernel's list of mounts tells it."""

from __future__ import annotations

import os
import re
from pathlib import Path

LOCAL_KINDS = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "bcachefs", "f2fs", "zfs", "tmpfs", "ramfs", "overlay"}
)
"""File systems that only this host's kernel writes. All others count as remote, those on FUSE included."""
MOUNTS = Path("/proc/self/mountinfo")

_ESCAPE = re.compile(r"\\([0-7]{3})")


def is_local(folder: str, mounts: Path = MOUNTS) -> bool:
    """Return whether ``folder`` is on a local file system; ``False`` if that is unknown.

    Args:
        mounts: a list of mounts in the format of ``/proc/self/mountinfo``; see proc_pid_mountinfo(5).
    """
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
        path = os.path.realpath(folder)
    except OSError:
        return False
    found, kind = "", ""
    for line in lines:
        fields, _, source = line.partition(" - ")
        point = _ESCAPE.sub(lambda code: chr(int(code[1], 8)), fields.split(" ")[4])
        # A later mount on the same point covers the earlier one.
        if len(point) >= len(found) and (path == point or path.startswith(point.rstrip("/") + "/")):
            found, kind = point, source.split(" ")[0]
    return kind in LOCAL_KINDS
