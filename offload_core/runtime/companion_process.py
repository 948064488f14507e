"""A companion: a long-lived helper process that ends with this process. Linux only."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from offload_core.runtime.companion_child import GROUP_SIGNALS, ProcessLimits, StartMessage

logger = logging.getLogger(__name__)


def describe_end(return_code: int | None) -> str:
    """Return the end of a process in words, such as ``was killed by SIGSEGV`` or ``exited with status 3``.

    Args:
        return_code: the exit status, or the negative number of a signal, as ``subprocess`` has it. ``None`` if another
            part of this process has collected it.
    """
    if return_code is None:
        return "ended for an unknown reason, because another part of this process collected its exit status"
    if return_code >= 0:
        return f"exited with status {return_code}"
    try:
        return f"was killed by {signal.Signals(-return_code).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-return_code}"


class WorkingFolder:
    """The working folder that this process has now. A later child can begin in it, also if it is moved or removed."""

    def __init__(self) -> None:
        self._link = _OWN_FOLDER
        with contextlib.suppress(OSError):  # the right to enter it may be gone, and a child needs no such right
            descriptor = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, descriptor)
            self._link = f"/proc/self/fd/{descriptor}"

    @property
    def path(self) -> str:
        """The path of the folder, as it is now. That of a removed folder names nothing."""
        return str(Path(self._link).readlink())

    @property
    def change(self) -> str | None:
        """The path by which a child enters the folder; ``None`` if this process is in it now.

        There is no change without need: the right to enter the own folder may be gone. Paths are compared, since the
        numbers of a folder on a dead mount cannot be read.
        """
        return None if self.path == str(Path(_OWN_FOLDER).readlink()) else self._link


_OWN_FOLDER = "/proc/self/cwd"


class CompanionProcess:
    """A Python module that runs as a child of this process, and ends with it in every case.

    The module's main function calls :func:`offload_core.runtime.companion_child.prepare_child` first. The kernel kills
    the child when the *thread* that started it ends, so a daemon thread starts the child and lives as long as it.
    Forks of this process must not use this object.

    The child has this process's session, standard output, standard error, and environment but for ``withheld``. Its
    command line is the interpreter, ``-m`` and the module.

    Args:
        module: full name of the module, which this process can import.
        descriptors: open descriptors above 2, by name. The child gets them under the same numbers; the caller closes
            its own after the start.
        payload: bytes for the child's program. May be secret: they travel in anonymous memory.
        limits: the share of the machine that the child gets.
        withheld: names of environment variables that the child does not get.
        folder: the child's working folder; ``None`` for the one that this process has at the start.
        on_end: called once with the words of :func:`describe_end`, on the daemon thread, after :attr:`is_alive` has
            become false. Not called if the start fails.

    Raises:
        ValueError: a descriptor is one of the standard streams.
    """

    def __init__(
        self,
        module: str,
        *,
        descriptors: Mapping[str, int] | None = None,
        payload: bytes = b"",
        limits: ProcessLimits | None = None,
        withheld: Collection[str] = (),
        folder: WorkingFolder | None = None,
        on_end: Callable[[str], None] = lambda description: None,
    ) -> None:
        if standard := [name for name, descriptor in (descriptors or {}).items() if descriptor <= 2]:
            raise ValueError(f"the descriptors of {', '.join(standard)} are not above 2; those are the child's own")
        self._module = module
        self._descriptors = dict(descriptors or {})
        self._payload = payload
        self._limits = limits or ProcessLimits()
        self._withheld = frozenset(withheld)
        self._folder = folder
        self._on_end = on_end
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False
        self._start_error: Exception | None = None
        self._started = threading.Event()
        self._gone = threading.Event()
        self._owner = threading.Thread(target=self._own, name=f"companion-{module}", daemon=True)

    def start(self, seconds: float = 10.0) -> None:
        """Start the child. Call this once. Returns when its interpreter begins, mostly after a few milliseconds.

        Args:
            seconds: limit on the wait, for an interpreter on a file system that hangs.

        Raises:
            OSError: the system cannot start another process, or this one may not enter the child's folder.
            TimeoutError: the interpreter did not begin in time. Keep the descriptors open until :meth:`wait_gone`.
        """
        self._owner.start()
        if not self._started.wait(seconds):
            self.kill()
            raise TimeoutError(f"the interpreter for {self._module} did not begin within {seconds:g} s")
        if self._start_error is not None:
            raise self._start_error

    @property
    def is_alive(self) -> bool:
        """``True`` from the start until the process has ended with all of its threads."""
        return self._process is not None and not self._gone.is_set()

    @property
    def pid(self) -> int | None:
        """The process id; ``None`` while there is no process."""
        process = self._process
        return None if process is None or self._gone.is_set() else process.pid

    def kill(self) -> None:
        """Send SIGKILL, and do not wait. Does nothing after the end. A stopped process is killed too."""
        with self._lock:
            self._killed = True
            self._kill_now()

    def wait_gone(self, seconds: float) -> bool:
        """Wait for the end, and return whether the process is gone. Never waits longer than ``seconds``.

        A process is gone when all of its threads are. One thread in a call that not even SIGKILL interrupts keeps the
        process from being gone, for example on a dead mount. Until then it may still write to shared memory.
        """
        return self._gone.wait(seconds)

    def _kill_now(self) -> None:
        # Not `Popen.kill`: it may collect the process, and the owner would never see the exit status.
        if self._process is not None and not self._gone.is_set():
            with contextlib.suppress(ProcessLookupError):  # something else has collected it
                os.kill(self._process.pid, signal.SIGKILL)

    # The methods below run on the thread that owns the process.

    def _own(self) -> None:
        # The child inherits this. It would otherwise die of a signal to the group before it can ignore one.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
        try:
            process = self._start_process()
        except Exception as error:
            self._start_error = error
            self._gone.set()
            self._started.set()
            return
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with self._lock:
            self._process = process
            if self._killed:  # the start took too long
                self._kill_now()
        self._started.set()
        description = self._wait(process)
        try:
            self._on_end(description)
        except Exception:
            logger.exception("the end of the process %s was not handled; this is a defect", self._module)

    def _start_process(self) -> subprocess.Popen[bytes]:
        # The interpreter must find the module before it can read the message, and must not look in the working folder.
        search_path = [entry for entry in sys.path if isinstance(entry, str)]  # imports ignore the others too
        folder = self._folder or WorkingFolder()
        changed = {
            "PYTHONPATH": os.pathsep.join(entry or folder.path for entry in search_path),
            "PYTHONSAFEPATH": "1",
        }
        message = StartMessage(
            parent_pid=os.getpid(),
            search_path=search_path,
            environment={name: os.environ.get(name) for name in changed},
            descriptors=self._descriptors,
            limits=self._limits,
            payload=self._payload,
        ).write()
        try:
            return subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=message,
                pass_fds=tuple(self._descriptors.values()),
                env={name: value for name, value in os.environ.items() if name not in self._withheld} | changed,
                cwd=folder.change,
            )
        finally:
            os.close(message)

    def _wait(self, process: subprocess.Popen[bytes]) -> str:
        """Wait for the end of the process and of all its threads; then collect it."""
        return_code: int | None = None
        try:
            # The process is left to be collected, so that its id stays its own until `kill` knows of the end.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            with self._lock:
                self._gone.set()
                process.wait()
        else:
            with self._lock:
                return_code = process.wait()
                self._gone.set()
        return describe_end(return_code)
