"""FUSE mounts as the kernel shows them; nothing here touches a file system that may hang."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

CONNECTIONS = Path("/sys/fs/fuse/connections")

_MNT_DETACH = 2


def connection_of(mount_point: Path) -> Path | None:
    """Return the kernel's folder for the newest FUSE mount on ``mount_point``, or ``None`` when there is none."""
    found = None
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        kind = fields[fields.index("-") + 1]
        if fields[4] == str(mount_point) and kind.startswith("fuse."):
            found = CONNECTIONS / fields[2].split(":")[1]
    return found


def show_connections() -> None:
    """Mount the kernel's list of connections where it belongs, unless it is there.

    Raises:
        OSError: it cannot be mounted.
    """
    if os.path.ismount(CONNECTIONS):
        return
    done = subprocess.run(
        ["mount", "-t", "fusectl", "fusectl", str(CONNECTIONS)], capture_output=True, text=True, check=False
    )
    if done.returncode and not os.path.ismount(CONNECTIONS):
        raise OSError(f"cannot mount fusectl: {done.stderr.strip()}")


def abort(connection: Path) -> None:
    """End every operation of a connection with ECONNABORTED, now and from now on; one that is gone is no error."""
    try:
        (connection / "abort").write_text("1")
    except FileNotFoundError:
        return


def detach(mount_point: Path) -> bool:
    """Unmount at once, whatever uses it. Returns whether something was mounted there."""
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.umount2(os.fsencode(mount_point), _MNT_DETACH)) == 0


def remove(mount_point: Path) -> None:
    """Abort and detach everything that is mounted on ``mount_point``."""
    while (connection := connection_of(mount_point)) is not None:
        abort(connection)
        if not detach(mount_point):
            return
