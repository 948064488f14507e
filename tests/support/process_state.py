"""The state of a process, as the kernel tells it."""

from __future__ import annotations

from pathlib import Path


def process_state(pid: int) -> str:
    """Return a process's state letter, such as ``D`` for one that even SIGKILL does not end."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended, reaped or not."""
    try:
        return process_state(pid) != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
