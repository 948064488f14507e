"""The state of processes and of this process's descriptors, as the kernel tells it."""

from __future__ import annotations

import contextlib
import gc
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

_OWN_FILES = re.compile(r"/memfd:|anon_inode:\[(eventfd|eventpoll|pidfd)\]|(socket|pipe):")

_ACCEPTS = 0x10000
"""``__SO_ACCEPTCON`` of linux/net.h, a flag in ``/proc/net/unix``."""


def process_state(pid: int) -> str:
    """Return a process's state letter, such as ``D`` for one that even SIGKILL does not end."""
    return _state_in(Path(f"/proc/{pid}"))


def thread_states(pid: int) -> Counter[str]:
    """Return how many threads of a process are in which state; none if it is gone.

    A process whose first thread has ended is a zombie by :func:`process_state`, however its other threads hang.
    """
    found: Counter[str] = Counter()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found[_state_in(task)] += 1
    return found


def listening_sockets(pid: int) -> set[str]:
    """Return the addresses of the Unix sockets on which a process can accept connections."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            inodes.add(str(link.readlink()).removeprefix("socket:[").rstrip("]"))
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {line[7] for line in lines if int(line[3], 16) & _ACCEPTS and line[6] in inodes and len(line) > 7}


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended, reaped or not."""
    try:
        return process_state(pid) != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def command_line(pid: int) -> bytes:
    """Return a process's command, its words divided by zero bytes; nothing if it is gone or was not reaped."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def io_process_ids(parent: int | None = None) -> list[int]:
    """Return the I/O processes of a process, by default of this one."""
    line = f"\nPPid:\t{parent or os.getpid()}\n"
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            is_one = entry.name.isdigit() and b"offload_core.io_process" in command_line(int(entry.name))
            if is_one and line in (entry / "status").read_text():
                found.append(int(entry.name))
    return found


def descendants(parent: int | None = None) -> set[int]:
    """Return the processes that a process, by default this one, and its descendants have started."""
    found: set[int] = set()
    unseen = [parent or os.getpid()]
    while unseen:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{unseen.pop()}/task").iterdir():
                unseen += map(int, (task / "children").read_text().split())
        found |= set(unseen)
    return found


def own_files() -> Counter[str]:
    """Return the kinds of this process's descriptors of shared memory, doorbells, sockets and the like."""
    gc.collect()  # a mapping has a descriptor of its own until the last view of it is gone
    kinds: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:  # the listing's own
            continue
        if _OWN_FILES.match(target):
            kinds[re.sub(r":\[\d+\]$", "", target)] += 1
    return kinds


def shared_memory_of(pid: int) -> set[int]:
    """Return the inode numbers of the memory files that a process has open or mapped; none if it is gone."""
    found: set[int] = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if fields[5:] and fields[5].startswith("/memfd:"):
                found.add(int(fields[4]))
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if str(entry.readlink()).startswith("/memfd:"):
                    found.add(entry.stat().st_ino)
    return found


def bytes_read(action: Callable[[], object]) -> int:
    """Return the bytes that this process reads while ``action`` runs, from page cache or disk."""
    before = _bytes_read_so_far()
    action()
    return _bytes_read_so_far() - before


def _bytes_read_so_far() -> int:
    found = re.search(r"^rchar: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def _state_in(folder: Path) -> str:
    """Return the state letter in the folder of a process or a thread."""
    return (folder / "stat").read_text().rpartition(")")[2].split()[0]
