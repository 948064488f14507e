"""Processes for engine runs: a fresh interpreter, or a fork of a server that has done the heavy imports.

Both give a run its own process and session, capture its output, and end every process that it started.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import TextIOWrapper
from multiprocessing.connection import Connection

_TAIL_LINES = 200
_OUTPUT_SECONDS = 5.0

# An OpenBLAS with more threads starts them when numpy is imported; a process must be forked from a single thread.
_SERVER_VARIABLES = {"OPENBLAS_NUM_THREADS": "1"}

# The server's imports have read every other variable already, and a fork cannot undo that.
_VARIABLES_FREE_TO_DIFFER = {
    "PYTHONPATH", "PYTEST_CURRENT_TEST", "OFFLOAD_TEST_ORDER",
    "OFFLOAD_CORE_DISK_ENCRYPTION_KEYS",  # read with the configuration
}  # fmt: skip


@dataclass(frozen=True)
class Preload:
    """The imports of the fork server, once for all runs, and its environment.

    Args:
        module: the module that it imports.
        environment: its environment variables; runs with others are not forked.
    """

    module: str
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Program:
    """A module with a ``main(arguments) -> exit code``, its arguments and its environment.

    Args:
        module: the module's name; ``python -m`` can run it too.
        arguments: the arguments of its ``main``.
        environment: all environment variables of the run.
        preload: the fork server; ``None`` for a fresh interpreter.
    """

    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    preload: Preload | None


def run_program(program: Program, timeout_seconds: float, on_line: Callable[[str], bool]) -> str | None:
    """Run ``program`` to its end and return its failure with its last 200 lines of output, or ``None``.

    ``on_line`` is called from another thread with each printed line; it returns true to leave the line out of the
    failure. No process of the run's session is left when this function returns.
    """
    tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)

    def keep(output: TextIOWrapper) -> None:
        with output:
            for line in output:
                if not on_line(line):
                    tail.append(line.rstrip("\n"))

    run = _run_forked if _can_fork(program) else _run_fresh
    problem = run(program, timeout_seconds, keep)
    return None if problem is None else "\n".join([f"the engine run failed: {problem}", *tail])


def _run_fresh(program: Program, timeout_seconds: float, keep: Callable[[TextIOWrapper], None]) -> str | None:
    child = subprocess.Popen(
        [sys.executable, "-m", program.module, *program.arguments],
        env=dict(program.environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert isinstance(child.stdout, TextIOWrapper)
    with _session(child.pid, keep, child.stdout):
        try:
            return _exit_problem(child.wait(timeout_seconds))
        except subprocess.TimeoutExpired:
            return _late(timeout_seconds)
        finally:
            _kill_session(child.pid)
            child.wait()


def _run_forked(program: Program, timeout_seconds: float, keep: Callable[[TextIOWrapper], None]) -> str | None:
    context = multiprocessing.get_context("forkserver")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=_forked_main, args=(writer, program))
    child.start()
    writer.close()
    assert child.pid is not None
    with reader:
        output = os.fdopen(os.dup(reader.fileno()), encoding="utf-8", errors="replace")
    with _session(child.pid, keep, output):
        try:
            child.join(timeout_seconds)
            return _late(timeout_seconds) if child.exitcode is None else _exit_problem(child.exitcode)
        finally:
            _kill_session(child.pid)
            child.kill()  # it may have no session of its own yet
            child.join()
            child.close()


def _forked_main(output: Connection, program: Program) -> None:
    """Set up the fork like a fresh interpreter with the program's environment, then run its main function."""
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    os.environ.clear()
    os.environ.update(program.environment)
    search_path = program.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = list(dict.fromkeys([*(entry for entry in search_path if entry), *sys.path]))
    sys.exit(importlib.import_module(program.module).main(list(program.arguments)))


@contextlib.contextmanager
def _session(pid: int, keep: Callable[[TextIOWrapper], None], output: TextIOWrapper) -> Iterator[None]:
    reader = threading.Thread(target=keep, args=(output,), name=f"output of {pid}", daemon=True)
    reader.start()
    try:
        yield
    finally:
        reader.join(_OUTPUT_SECONDS)


def _kill_session(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _exit_problem(code: int) -> str | None:
    return f"exit code {code}" if code else None


def _late(timeout_seconds: float) -> str:
    return f"no end after {timeout_seconds:g} s"


_server_environment: dict[str, str] | None = None
_server_lock = threading.Lock()


def _can_fork(program: Program) -> bool:
    """Return whether a fork of the server sees the environment of a fresh interpreter; start the server if needed."""
    global _server_environment
    if program.preload is None:
        return False
    with _server_lock:
        if _server_environment is None:
            _start_server(program.preload)
            _server_environment = dict(program.preload.environment)
        both = _server_environment.keys() | program.environment.keys()
        different = {name for name in both if _server_environment.get(name) != program.environment.get(name)}
    return different <= _VARIABLES_FREE_TO_DIFFER


def _start_server(preload: Preload) -> None:
    before = dict(os.environ)
    multiprocessing.forkserver.set_forkserver_preload([preload.module])
    try:
        os.environ.clear()
        os.environ.update({**_SERVER_VARIABLES, **preload.environment})
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
