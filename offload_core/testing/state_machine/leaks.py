"""A watch on the threads and file descriptors of this process that names the step in which each of them appeared."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_DESCRIPTORS = Path("/proc/self/fd")


class Held(NamedTuple):
    """A thread or a file descriptor of this process."""

    kind: str
    number: int
    name: str
    identity: tuple[int, int]
    """Device and inode of a descriptor's file; tells apart two files with one number."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" if self.kind == "thread" else f"{self.kind} {self.number} ({self.name})"


def held_now() -> set[Held]:
    """Return the threads and the file descriptors of this process; without ``/proc``, threads only."""
    held = {
        Held("thread", thread.ident or 0, thread.name, (0, 0))
        for thread in threading.enumerate()
        if thread.is_alive() and not thread.name.startswith("turns")  # the machine's own
    }
    if not _DESCRIPTORS.is_dir():
        return held
    for link in list(_DESCRIPTORS.iterdir()):
        try:
            target, found = str(link.readlink()), os.fstat(int(link.name))
        except OSError:  # the descriptor of this listing, or one that another thread has closed
            continue
        held.add(Held("file descriptor", int(link.name), target, (found.st_dev, found.st_ino)))
    return held


class Leaks:
    """The threads and descriptors that one example has opened, with the step that opened each."""

    def __init__(self) -> None:
        self._before = held_now()
        self._opened_by: dict[Held, str] = {}

    def step_ended(self, step: str) -> None:
        """Note the threads and descriptors that are new since the last step."""
        for new in held_now() - self._before - self._opened_by.keys():
            self._opened_by[new] = step

    def left(self) -> Mapping[Held, str]:
        """Return those that are still there, each with its step."""
        now = held_now()
        return {held: step for held, step in self._opened_by.items() if held in now}
