"""A server ends with the test run that started it, however that ends."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.polling import wait_until
from tests.support.process_state import is_running
from tests.support.server_process import ServerProcess, accepts, free_port


def http_server(port: int, log: Path | None = None) -> ServerProcess:
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
    return ServerProcess(command, lambda: accepts(port), log)


def test_no_server_outlives_a_killed_test_run(tmp_path: Path) -> None:
    program = f"""
        import time
        from tests.support.test_server_process import http_server
        server = http_server({free_port()})
        server.start()
        print(server.pid, flush=True)
        time.sleep(100)
    """
    run = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    with run.stdout:
        server = int(run.stdout.readline())
    assert is_running(server)
    run.kill()
    run.wait()
    wait_until(lambda: not is_running(server), "the server does not end")


def test_a_server_is_killed_suspended_and_started_again() -> None:
    server = http_server(free_port())
    server.start()
    first = server.pid
    server.kill()
    server.kill()
    assert not is_running(first)
    server.start()
    server.pause()
    server.stop()
    assert not is_running(server.pid)
    server.stop()


def test_the_log_of_a_server_that_ends_at_once_is_shown(tmp_path: Path) -> None:
    server = ServerProcess([sys.executable, "-c", "print('no such port')"], lambda: False, tmp_path / "log")
    with pytest.raises(AssertionError, match=f"{os.path.basename(sys.executable)} ended at once: no such port"):  # noqa: PTH119
        server.start()
