"""Reading and writing past the page cache (``O_DIRECT``).

Addresses, offsets and lengths must be multiples of the device's block size; whole pages satisfy every file system that
is met in practice. When the last page of an object is not full, it is read through a page of the thread's own.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import secrets
import threading
from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np

from offload_backend_disk.folder.layout import TEMPORARY_SUFFIX
from offload_core.api import TierLogger

PAGE_BYTES = 4096

DirectIo = Literal["off", "on", "auto"]

_PROBE = f".direct-io.{{}}{TEMPORARY_SUFFIX}"
_CANNOT_PROBE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)
_thread_local = threading.local()


def is_aligned(buffer: memoryview) -> bool:
    """Return whether ``buffer``, which may be read-only, starts at a page and has at least one whole page."""
    return len(buffer) >= PAGE_BYTES and _address(buffer) % PAGE_BYTES == 0


def read(descriptor: int, buffer: memoryview) -> int:
    """Read a file from its beginning into an aligned ``buffer``, in one system call.

    Args:
        descriptor: opened with ``O_DIRECT``.

    Returns:
        The bytes read. These are ``len(buffer)`` for a file of that size, and up to a page more for a longer one.
        They are fewer if the file is shorter or the system call ended early.
    """
    tail_bytes = len(buffer) % PAGE_BYTES
    whole_bytes = len(buffer) - tail_bytes
    page = _page()
    count = os.preadv(descriptor, [buffer[:whole_bytes], page], 0)
    if tail_bytes and count >= len(buffer):
        buffer[whole_bytes:] = page[:tail_bytes]
    return count


def write(descriptor: int, buffer: memoryview) -> None:
    """Write an aligned ``buffer`` to the beginning of a new file.

    The bytes after its last whole page go through the page cache. Padding the file and truncating it afterwards was
    measured to be no faster, and other clients must never see padding.

    Args:
        descriptor: opened with ``O_DIRECT``, which this call may clear.
    """
    whole_bytes = len(buffer) - len(buffer) % PAGE_BYTES
    done = 0
    while done < whole_bytes and done % PAGE_BYTES == 0:
        done += os.pwrite(descriptor, buffer[done:whole_bytes], done)
    if done < len(buffer):
        clear_direct(descriptor)
        while done < len(buffer):
            done += os.pwrite(descriptor, buffer[done:], done)


def clear_direct(descriptor: int) -> None:
    """Make the descriptor use the page cache from now on."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)


def use_direct_io(folder: Path, option: DirectIo, log: TierLogger) -> bool:
    """Return whether objects in ``folder`` are read and written past the page cache. Blocks.

    In a folder that cannot be written, direct I/O cannot be tried: it is read through the page cache.

    Raises:
        OSError: the option is ``on`` and the folder's file system does not support it.
    """
    if option == "off":
        return False
    try:
        _probe(folder)
    except OSError as error:
        cannot_probe = error.errno in _CANNOT_PROBE
        if option == "on" and not cannot_probe:
            raise OSError(
                error.errno,
                f"{folder}: direct_io: on, but its file system does not {error.strerror}; set direct_io to off or "
                "auto, or choose a folder on a file system that supports O_DIRECT, such as ext4 or xfs",
            ) from error
        log.log(
            logging.WARNING if option == "on" else logging.INFO,
            "%s: direct_io: %s uses the page cache: %s %s",
            folder, option, "it cannot" if cannot_probe else "its file system does not", error.strerror,
        )  # fmt: skip
        return False
    return True


def _probe(folder: Path) -> None:
    """Write a small file past the page cache and read it back.

    Raises:
        OSError: the step that failed, and the reason.
    """
    for left in folder.glob(_PROBE.format("*")):  # of a killed process; a running probe has its file open
        with suppress(OSError):
            left.unlink()
    path = folder / _PROBE.format(secrets.token_hex(8))
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT
    data = os.urandom(PAGE_BYTES)
    page = _page()
    page[:] = data
    step = "open a file with O_DIRECT"
    try:
        descriptor = os.open(path, flags, 0o600)
        try:
            step = f"write {PAGE_BYTES} bytes with O_DIRECT"
            os.pwrite(descriptor, page, 0)
            page[:] = bytes(PAGE_BYTES)
            step = f"read {PAGE_BYTES} bytes with O_DIRECT"
            os.preadv(descriptor, [page], 0)
        finally:
            os.close(descriptor)
        if page != data:
            raise OSError(errno.EIO, "other bytes came back")
    except OSError as error:
        raise OSError(error.errno, f"{step} ({error.strerror})") from error
    finally:
        with suppress(OSError):
            path.unlink()


def _page() -> memoryview:
    """Return this thread's page."""
    try:
        page: memoryview = _thread_local.page
    except AttributeError:
        page = _thread_local.page = memoryview(mmap.mmap(-1, PAGE_BYTES))
    return page


def _address(buffer: memoryview) -> int:
    """Return the address of a buffer in memory."""
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)
