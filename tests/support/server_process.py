"""A server as a process of its own: it can be killed, suspended and started again, and it ends with the test run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.polling import wait_until
from tests.support.process_state import thread_states

START_LIMIT_SECONDS = 60
STOP_LIMIT_SECONDS = 15

# The kernel kills the server when its parent dies, however that happens; a parent that is dead already is noticed too.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the test run is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


LOOPBACK = "127.0.0.1"


def free_port(host: str = LOOPBACK) -> int:
    """Return a TCP port of an address of this host that nobody uses now."""
    with socket.socket() as free:
        free.bind((host, 0))
        return int(free.getsockname()[1])


def accepts(port: int, host: str = LOOPBACK) -> bool:
    """Return whether a server accepts connections on a port of an address."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


_starter = ThreadPoolExecutor(1, "server-starter")  # a server ends with the thread that has started it


class ServerProcess:
    """A server that a test starts and hurts.

    Args:
        command: the program and its arguments.
        is_ready: returns whether the server answers.
        log: a file that gets its output; by default its output is dropped.
        environment: additional environment variables.
    """

    def __init__(
        self,
        command: Sequence[str],
        is_ready: Callable[[], bool],
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command = list(command)
        self._is_ready = is_ready
        self.log = log
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process is not None, "it was not started"
        return self._process.pid

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            AssertionError: it ended, or did not answer in time; with the end of its log.
        """
        if self._process is not None:
            self._process.wait(STOP_LIMIT_SECONDS)  # another process may have killed it
        launcher = [sys.executable, "-c", _LAUNCHER, str(os.getpid()), *self._command]
        with Path(os.devnull if self.log is None else self.log).open("ab") as output:
            process = self._process = _starter.submit(
                lambda: subprocess.Popen(
                    launcher, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self._environment
                )
            ).result()
        deadline = time.monotonic() + START_LIMIT_SECONDS
        while not self._is_ready():
            assert process.poll() is None, f"{self._command[0]} ended at once: {self._log_end()}"
            assert time.monotonic() < deadline, f"{self._command[0]} does not answer: {self._log_end()}"
            time.sleep(0.05)

    def kill(self) -> None:
        """End the server as a crash does. Harmless when repeated."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        """Suspend the server: its connections stay open, and it answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_until(lambda: set(thread_states(self.pid)) == {"T"}, "the server goes on")

    def resume(self) -> None:
        """Let a suspended server go on."""
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End the server in an orderly way, or kill it. Harmless when repeated, and for a suspended server."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        self.resume()
        try:
            self._process.wait(STOP_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def _log_end(self) -> str:
        return "" if self.log is None else self.log.read_text(errors="replace")[-2000:]
