"""A recorder of calls that wait for the operating system, on a thread that must not make them.

Python's audit events report most of these calls. Functions without an event are replaced while the recorder runs.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest import mock

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
_WITHOUT_EVENT: list[tuple[Any, str]] = [
    (time, "sleep"),  # it has an event from Python 3.13 on
    (threading.Condition, "wait"),  # events, queues and futures of threads wait by it
    (threading.Thread, "join"),
    *(
        (os, name)
        for name in (
            *("stat", "lstat", "statvfs", "fstatvfs", "access", "fsync", "fdatasync", "sync", "sendfile"),
            *("read", "readv", "pread", "preadv", "write", "writev", "pwrite", "pwritev", "copy_file_range"),
        )
    ),
    *((socket.socket, name) for name in ("recv", "recv_into", "recvfrom", "send", "sendall", "sendto", "accept")),
]
_WAITING_MODULES = ("threading", "queue", "concurrent.futures._base", "concurrent.futures.thread")
_NOT_THE_BACKENDS = ("importlib._bootstrap", "linecache", "traceback", "tokenize")
_lock = threading.Lock()
_installed = False
_thread: int | None = None
_recorded: list[str] = []


@contextmanager
def blocking_calls() -> Iterator[list[str]]:
    """Record this thread's calls that may block, in the form ``open('/a/path') at file.py:12``.

    Imports and the calls of asyncio itself are left out.
    """
    global _installed, _thread
    with _lock:
        if not _installed:
            sys.addaudithook(_audit)  # a hook cannot be removed, so the process gets one only
            _installed = True
    recorded: list[str] = []
    _recorded[:] = []
    with ExitStack() as replaced:
        for module, name in _WITHOUT_EVENT:
            if hasattr(module, name):
                recording = _recording(f"{module.__name__}.{name}", getattr(module, name))
                replaced.enter_context(mock.patch.object(module, name, recording, create=name not in vars(module)))
        _thread = threading.get_ident()
        try:
            yield recorded
        finally:
            _thread = None
            recorded += _recorded


def _recording(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if _thread == threading.get_ident() and not _never_waits(arguments, named):
            _record(name, arguments, sys._getframe(1))
        return function(*arguments, **named)

    return call


def _never_waits(arguments: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Return whether a call is one of a socket that does not block, or a wait of no time."""
    first = arguments[0] if arguments else None
    if isinstance(first, socket.socket):
        return first.gettimeout() == 0
    return isinstance(first, threading.Condition | threading.Thread) and 0 in (*arguments[1:], *named.values())


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if _thread is not None and event in _EVENTS and _thread == threading.get_ident():
        _record(event, arguments, sys._getframe(1))


def _record(name: str, arguments: tuple[object, ...], caller: FrameType) -> None:
    frame: FrameType | None = caller
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_NOT_THE_BACKENDS) or (frame is caller and module.startswith("asyncio.")):
            return
        if frame.f_code is threading.Thread.start.__code__:  # waits a moment until the thread runs
            return
        frame = frame.f_back
    argument = repr(arguments[0]) if arguments else ""
    place = _caller_beyond(caller, _WAITING_MODULES)
    _recorded.append(f"{name}({argument}) at {place.f_code.co_filename}:{place.f_lineno}")


def _caller_beyond(frame: FrameType, modules: Collection[str]) -> FrameType:
    """Return the innermost frame that is not of one of ``modules``."""
    beyond: FrameType | None = frame
    while beyond is not None and beyond.f_globals.get("__name__") in modules:
        beyond = beyond.f_back
    return beyond or frame
