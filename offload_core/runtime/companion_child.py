"""The child's side of a companion process: its start message, and its first steps. Linux only.

This imports little, since each import delays the moment from which the child ends with its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any, Final

_PR_SET_PDEATHSIG = 1
_STDIN = 0
_KIND = "offload-core companion 1"

GROUP_SIGNALS: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
"""Signals that reach the whole group: from a terminal, a service manager, or ``timeout``."""


@dataclass(frozen=True)
class ProcessLimits:
    """The share of the machine that a companion process gets.

    Args:
        niceness: 0 to 19; a parent of higher niceness keeps its own for the child, since lowering needs privileges.
        cpus: numbers of the processors that it may use; empty for those of the parent.
        memory_bytes: limit on its private writable memory, or ``None``. Each thread's stack counts as a whole, mostly
            8 MiB. An allocation beyond the limit fails, in Python with ``MemoryError``.

    The limit is ``RLIMIT_DATA``. ``RLIMIT_AS`` would count shared memory too, which is far larger than the rest.
    ``RLIMIT_RSS`` has no effect on Linux.

    Raises:
        ValueError: a value is out of its range.
    """

    niceness: int = 0
    cpus: frozenset[int] = frozenset()
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.niceness <= 19:
            raise ValueError(f"niceness {self.niceness} is not possible; give 0 to 19")
        if any(cpu < 0 for cpu in self.cpus):
            raise ValueError(f"there are no processors {sorted(self.cpus)}; they are numbered from 0")
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise ValueError(f"a memory limit of {self.memory_bytes} bytes is not possible; give more than 0, or None")


@dataclass(frozen=True)
class StartMessage:
    """The parent's first message, in a memory file that is the child's standard input.

    So its payload is neither on the command line, which all users may read, nor in the environment, which the child's
    own children inherit.

    Args:
        parent_pid: the parent's process id.
        search_path: the parent's ``sys.path``.
        environment: the parent's values of the variables that were changed for the start; ``None`` if it has none.
        descriptors: names and numbers of the descriptors that are passed.
        limits: applied by :func:`prepare_child`.
        payload: bytes for the child's program.
    """

    parent_pid: int
    search_path: list[str]
    environment: Mapping[str, str | None] = field(default_factory=dict)
    descriptors: Mapping[str, int] = field(default_factory=dict)
    limits: ProcessLimits = field(default_factory=ProcessLimits)
    payload: bytes = b""

    def write(self) -> int:
        """Return the descriptor of a memory file with this message. The caller closes it.

        Raises:
            OSError: the system has no descriptor or no memory left.
        """
        fields = {**asdict(self), "kind": _KIND}
        payload = fields.pop("payload")
        fields["limits"]["cpus"] = sorted(self.limits.cpus)
        descriptor = os.memfd_create("offload-companion-start", os.MFD_CLOEXEC)
        with open(descriptor, "wb", closefd=False) as file:
            file.write(json.dumps(fields).encode() + b"\n" + payload)
        return descriptor

    @classmethod
    def read(cls, descriptor: int) -> StartMessage:
        """Read a message.

        Raises:
            OSError: the descriptor is no file.
            ValueError: the file contains no message of this version.
        """
        content = bytearray()
        while part := os.pread(descriptor, 1 << 20, len(content)):
            content += part
        line, _, payload = content.partition(b"\n")
        fields: dict[str, Any] = json.loads(line)
        if not isinstance(fields, dict) or fields.pop("kind", None) != _KIND:
            raise ValueError(f"the file does not begin with a message of the kind {_KIND!r}")
        limits = fields.pop("limits")
        limits["cpus"] = frozenset(limits["cpus"])
        return cls(**fields, limits=ProcessLimits(**limits), payload=bytes(payload))


def prepare_child() -> StartMessage:
    """Tie this process to its parent, and return the parent's message. A child's main function calls this first.

    From now on the kernel kills this process when its parent ends. The processes that this one starts are not tied.
    This process ignores :data:`GROUP_SIGNALS`, since the parent gets them too and ends its child tidily. The
    programs that this process starts, and its forks, end on SIGTERM and SIGHUP as usual.
    Standard input is the null device. ``sys.path`` is the parent's, and the limits are in force.

    The niceness and the processors hold for this thread and for threads that start later. So call this before
    any import that starts threads.

    Raises:
        SystemExit: a person has started this program, or the parent has ended already.
        OSError: the machine has none of the processors.
    """
    _end_with_parent()
    try:
        message = StartMessage.read(_STDIN)
    except (OSError, ValueError):
        raise SystemExit("this program is a part of offload-core, which starts it when it is needed") from None
    if os.getppid() != message.parent_pid:
        raise SystemExit("the process that started this one has ended")  # before the kernel knew that we end with it
    _ignore_group_signals()
    _read_nothing_more()
    for name, value in message.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    sys.path[:] = message.search_path
    _apply(message.limits)
    return message


def outlive_parent() -> None:
    """Go on after the end of the parent. Call this on the thread that called :func:`prepare_child`."""
    _set_signal_of_parents_death(0)


def _end_with_parent() -> None:
    _set_signal_of_parents_death(signal.SIGKILL)


def _ignore_group_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    others = GROUP_SIGNALS - {signal.SIGINT}
    for number in others:  # not SIG_IGN, which programs inherit: helpers of backends are ended by these
        signal.signal(number, _do_nothing)
        signal.siginterrupt(number, False)

    def restore() -> None:
        for number in others:
            signal.signal(number, signal.SIG_DFL)

    os.register_at_fork(after_in_child=restore)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)  # blocked by the parent, from the first moment


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass


def _set_signal_of_parents_death(number: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number)):
        error = ctypes.get_errno()
        raise OSError(error, f"the tie of this process to its parent cannot be changed: {os.strerror(error)}")


def _read_nothing_more() -> None:
    """Replace standard input, which frees the message's memory."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, _STDIN)
    os.close(null)


def _apply(limits: ProcessLimits) -> None:
    niceness = max(limits.niceness, os.getpriority(os.PRIO_PROCESS, 0))
    os.setpriority(os.PRIO_PROCESS, 0, niceness)
    if limits.cpus:
        try:
            os.sched_setaffinity(0, limits.cpus)
        except OSError as error:
            raise OSError(
                error.errno, f"this process may use none of the processors {sorted(limits.cpus)}: {error.strerror}"
            ) from None
    if limits.memory_bytes is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = limits.memory_bytes if hard == resource.RLIM_INFINITY else min(limits.memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
