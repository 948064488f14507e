"""A companion process for tests: it tells about itself, and then does as it is told over a socket."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import socket
import sys
import threading
from pathlib import Path

from offload_core.runtime.companion_child import prepare_child

_EXIT_OF_THREAD = {"x86_64": 60, "aarch64": 93}


def main() -> None:
    at_first = {"search_path": list(sys.path), "blocked": _blocked()}
    start = prepare_child()
    connection = socket.socket(fileno=start.descriptors["connection"])
    report = {
        "at_first": at_first,
        "command_line": Path("/proc/self/cmdline").read_text().split("\0")[:-1],
        "search_path": sys.path,
        "modules": sorted(sys.modules),
        "environment": dict(os.environ),
        "first_environment": dict(
            line.split("=", 1) for line in Path("/proc/self/environ").read_text().split("\0") if "=" in line
        ),
        "descriptors": dict(start.descriptors),
        "open": {link.name: str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()},
        "payload": start.payload.hex(),
        "folder": str(Path("/proc/self/cwd").readlink()),
        "session": os.getsid(0),
        "group": os.getpgid(0),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "cpus": sorted(os.sched_getaffinity(0)),
        "memory_bytes": resource.getrlimit(resource.RLIMIT_DATA),
        "blocked": _blocked(),
    }
    connection.sendall(json.dumps(report).encode() + b"\n")
    _obey(connection)


def _blocked() -> list[int]:
    return sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def _fork() -> int:
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(writing, b"!")
        threading.Event().wait()
    os.read(reading, 1)  # a signal that comes earlier may be lost
    return pid


def _end(pid: int, number: int) -> int:
    os.kill(pid, number)
    return -os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _obey(connection: socket.socket) -> None:
    while order := connection.recv(4096):
        match order.split():
            case [b"ping"]:
                connection.sendall(b"pong")
            case [b"exit", status]:
                sys.exit(int(status))
            case [b"end", b"helpers", b"by", number]:
                program = os.posix_spawnp("sleep", ["sleep", "60"], os.environ)
                connection.sendall(b" ".join(b"%d" % _end(pid, int(number)) for pid in (program, _fork())))
            case [b"kill", number]:
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                os.kill(os.getpid(), int(number))
            case [b"allocate", nbytes]:
                try:
                    bytearray(int(nbytes))
                except MemoryError:
                    connection.sendall(b"no memory")
                else:
                    connection.sendall(b"memory")
            case [b"end", b"main", b"thread"]:
                threading.Thread(target=_obey, args=(connection,)).start()
                # Not the end of the process, and not one that Python knows of: the other thread goes on.
                ctypes.CDLL(None).syscall(_EXIT_OF_THREAD[platform.machine()], 0)


if __name__ == "__main__":
    main()
