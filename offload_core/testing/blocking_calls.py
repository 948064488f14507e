"""Records calls that wait for the operating system, on the thread that must not make them.

Python's audit events name them as they happen. ``os.stat``, ``os.read`` and ``os.write`` have no event.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_EVENTS = frozenset(
    [
        "open",
        "os.listdir",
        "os.scandir",
        "os.mkdir",
        "os.rename",
        "os.remove",
        "os.rmdir",
        "os.link",
        "os.symlink",
        "os.truncate",
        "os.chmod",
        "os.chown",
        "os.utime",
        "os.getxattr",
        "os.setxattr",
        "os.listxattr",
        "os.system",
        "os.posix_spawn",
        "os.fork",
        "os.exec",
        "os.lockf",
        "fcntl.flock",
        "fcntl.lockf",
        "time.sleep",
        "subprocess.Popen",
        "sqlite3.connect",
        "glob.glob",
        "tempfile.mkstemp",
        "tempfile.mkdtemp",
        "urllib.Request",
        "socket.connect",
        "socket.getaddrinfo",
        "socket.gethostbyname",
        "socket.gethostbyaddr",
    ]
)
_NOT_THE_BACKENDS = ("asyncio.", "importlib._bootstrap", "linecache", "traceback", "tokenize")
_lock = threading.Lock()
_installed = False
_thread: int | None = None
_recorded: list[str] = []


@contextmanager
def blocking_calls() -> Iterator[list[str]]:
    """Record what this thread calls that may block, in the words ``open('/a/path') at file.py:12``.

    Imports, and what asyncio itself calls, are left out.
    """
    global _installed, _thread
    with _lock:
        if not _installed:
            sys.addaudithook(_hook)  # it cannot be removed again, so there is one for good
            _installed = True
    recorded: list[str] = []
    _recorded[:] = []
    _thread = threading.get_ident()
    try:
        yield recorded
    finally:
        _thread = None
        recorded += _recorded


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if _thread is None or event not in _EVENTS or threading.get_ident() != _thread:
        return
    caller: FrameType | None = sys._getframe(1)
    frame = caller
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_NOT_THE_BACKENDS[1:]) or (frame is caller and name.startswith(_NOT_THE_BACKENDS[0])):
            return
        frame = frame.f_back
    where = f" at {caller.f_code.co_filename}:{caller.f_lineno}" if caller is not None else ""
    _recorded.append(f"{event}({arguments[0]!r}){where}" if arguments else f"{event}(){where}")
