"""The pass-through file system: every operation is done on a folder behind it, unless a rule says otherwise.

Imported only by the daemon: the test process does not load libfuse.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fuse

from tests.media.fuse.rules import Rule, RulesFile

fuse.fuse_python_api = (0, 2)

_POLL_SECONDS = 0.005


class _OpenFile:
    """An open file, past the page cache unless it is one that programs map into memory."""

    keep_cache = False

    def __init__(self, descriptor: int, path: str) -> None:
        self.descriptor = descriptor
        self.direct_io = not path.endswith("-shm")  # SQLite's; a direct file cannot be mapped
        self.lock = threading.Lock()


class FaultFileSystem(fuse.Fuse):  # type: ignore[misc] # fuse-python has no types
    """Operations of libfuse's high-level interface. Paths start with ``/``; errors are ``OSError``.

    Args:
        backing: the folder behind it.
        rules: what goes wrong.
        hits: file to which one line is written whenever a rule applies.
    """

    def __init__(self, backing: Path, rules: RulesFile, hits: Path) -> None:
        super().__init__()
        self._backing = str(backing)
        self._rules = rules
        self._hits = os.open(hits, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _begin(self, operation: str, path: str) -> Rule | None:
        """Do what a rule asks for before the operation; return a rule that changes the operation itself."""
        rule = self._rules.first_match(operation, path)
        if rule is None:
            return None
        line = json.dumps({"number": rule.number, "operation": operation, "path": path}) + "\n"
        os.write(self._hits, line.encode())
        if rule.fault == "error":
            raise OSError(rule.errno, os.strerror(rule.errno))
        if rule.fault == "delay":
            time.sleep(rule.seconds)
        while rule.fault == "hang" and rule in self._rules.current():
            time.sleep(_POLL_SECONDS)
        return rule if rule.fault in ("cut", "part", "flip") else None

    def _real(self, operation: str, path: str) -> str:
        self._begin(operation, path)
        return self._backing + path

    def getattr(self, path: str) -> os.stat_result:
        return os.lstat(self._real("getattr", path))

    def fgetattr(self, path: str, file: _OpenFile) -> os.stat_result:
        self._begin("getattr", path)
        return os.fstat(file.descriptor)

    def readdir(self, path: str, offset: int) -> Iterator[Any]:
        folder = self._real("readdir", path)
        with os.scandir(folder) as entries:
            found = [(entry.name, entry.inode()) for entry in entries]
        own = os.lstat(folder).st_ino
        return iter([fuse.Direntry(name, ino=number) for name, number in ((".", own), ("..", own), *found)])

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._real("mkdir", path), mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._real("rmdir", path))

    def unlink(self, path: str) -> None:
        os.unlink(self._real("unlink", path))

    def rename(self, path: str, other: str) -> None:
        os.rename(self._real("rename", path), self._backing + other)

    def link(self, path: str, other: str) -> None:
        os.link(self._real("link", path), self._backing + other)

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._real("chmod", path), mode)

    def chown(self, path: str, user: int, group: int) -> None:
        os.chown(self._real("chown", path), user, group)

    def truncate(self, path: str, length: int) -> None:
        os.truncate(self._real("truncate", path), length)

    def ftruncate(self, path: str, length: int, file: _OpenFile) -> None:
        self._begin("truncate", path)
        os.ftruncate(file.descriptor, length)

    def utimens(self, path: str, accessed: Any, modified: Any) -> None:
        times = [one.tv_sec * 10**9 + one.tv_nsec for one in (accessed, modified)]
        os.utime(self._real("utimens", path), ns=(times[0], times[1]))

    def statfs(self) -> os.statvfs_result:
        return os.statvfs(self._real("statfs", "/"))

    def open(self, path: str, flags: int) -> _OpenFile:
        # libfuse has taken O_CREAT and O_EXCL out; O_DIRECT is between the program and this mount.
        return _OpenFile(os.open(self._real("open", path), flags & ~os.O_DIRECT), path)

    def create(self, path: str, flags: int, mode: int) -> _OpenFile:
        return _OpenFile(os.open(self._real("create", path), flags & ~os.O_DIRECT | os.O_CREAT, mode), path)

    def read(self, path: str, length: int, offset: int, file: _OpenFile) -> bytes:
        rule = self._begin("read", path)
        if rule is not None and rule.fault == "cut":
            length = max(0, min(length, os.fstat(file.descriptor).st_size // 2 - offset))
        if rule is not None and rule.fault == "part":
            length = (length + 1) // 2
        content = os.pread(file.descriptor, length, offset)
        return _flipped(content) if rule is not None and rule.fault == "flip" else content

    def write(self, path: str, content: bytes, offset: int, file: _OpenFile) -> int:
        rule = self._begin("write", path)
        if rule is not None and rule.fault == "part":
            content = content[: (len(content) + 1) // 2]
        if rule is not None and rule.fault == "flip":
            content = _flipped(content)
        return os.pwrite(file.descriptor, content, offset)

    def flush(self, path: str, file: _OpenFile) -> None:
        self._begin("flush", path)

    def fsync(self, path: str, data_only: int, file: _OpenFile) -> None:
        self._begin("fsync", path)  # nothing is to outlive this machine

    def release(self, path: str, flags: int, file: _OpenFile) -> None:
        with file.lock:
            os.close(file.descriptor)


def _flipped(content: bytes) -> bytes:
    return bytes([content[0] ^ 0x80]) + content[1:] if content else content


def serve(mount_point: Path, backing: Path, rules: Path, hits: Path) -> None:
    """Mount and serve until it is unmounted or its connection is aborted.

    Nothing is remembered by the kernel, so that every operation of a program is one of the daemon too.

    Raises:
        fuse.FuseError: it cannot be mounted.
    """
    server = FaultFileSystem(backing, RulesFile(rules), hits)
    server.multithreaded = True
    options = "fsname=faultfs,subtype=faultfs,attr_timeout=0,entry_timeout=0,negative_timeout=0,use_ino"
    try:
        server.main(["faultfs", str(mount_point), "-f", "-o", options])
    except fuse.FuseError as error:
        raise OSError(errno.EIO, f"libfuse cannot mount: {error}", str(mount_point)) from error
