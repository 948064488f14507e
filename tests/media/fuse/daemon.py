"""The process that serves one mount, and its guard.

    python -m tests.media.fuse.daemon MOUNT_POINT FOLDER

``FOLDER`` holds ``backing``, the folder behind the mount, ``rules.json`` and ``hits.jsonl``. The process that is
started is the guard. It prints the daemon's process id and then waits until it gets a line, its standard input ends
without one, which is when the test's process has died, or the daemon ends. Then it kills the daemon, stopped or not,
aborts the connection, so that no process hangs in the mount, and unmounts it. Of a dead test it removes the folder too.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
from pathlib import Path

from tests.media.fuse import connections


def main(arguments: list[str]) -> int:
    """Guard a daemon on the mount point ``arguments[0]`` until there is no more need for it."""
    mount_point, folder = map(Path, arguments)
    os.setsid()  # so that the test's process can be killed with its group, and the guard goes on
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    daemon = os.fork()
    if daemon == 0:
        _serve(mount_point, folder)
    print(daemon, flush=True)
    orphaned = False
    try:
        ended = os.pidfd_open(daemon)
        ready, _, _ = select.select([sys.stdin, ended], [], [])
        orphaned = sys.stdin in ready and not sys.stdin.readline()
    finally:
        os.kill(daemon, signal.SIGKILL)  # not waited for yet, so the number is still its own
        os.waitpid(daemon, 0)
        connections.remove(mount_point)
        if orphaned and connections.connection_of(mount_point) is None:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def _serve(mount_point: Path, folder: Path) -> None:
    """Become the daemon; never returns."""
    code = 1
    try:
        from tests.media.fuse.filesystem import serve

        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        serve(mount_point, folder / "backing", folder / "rules.json", folder / "hits.jsonl")
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
