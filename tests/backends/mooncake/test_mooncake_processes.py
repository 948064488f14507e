"""Ends of processes with a connection: in calls, after a fork, and after Mooncake has given up on a call."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from offload_backend_mooncake import library

from tests.backends.mooncake.conftest import NewCluster
from tests.backends.mooncake.raw_client import DEADLINES
from tests.support.clusters.mooncake import MooncakeCluster
from tests.support.paths import ROOT

Child = Callable[..., subprocess.CompletedProcess[str]]


def child(case: str, cluster: MooncakeCluster, limit_seconds: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.backends.mooncake.process_child", case, cluster.master]
    command.append(str(cluster.parts["owner"].pid))
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_seconds, check=False)


@pytest.mark.long
def test_a_process_that_ends_while_it_loads_does_not_crash(new_cluster: NewCluster) -> None:
    cluster = new_cluster(forget_seconds=60)
    done = child("exit_while_loading", cluster)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("case", ["close_while_loading", "fork"])
def test_a_connection_survives(case: str, shared_cluster: MooncakeCluster) -> None:
    done = child(case, shared_cluster)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.long
def test_mooncakes_own_client_crashes_when_it_is_closed_in_a_call(shared_cluster: MooncakeCluster) -> None:
    codes = {child("raw_close_while_loading", shared_cluster).returncode for _ in range(5)}
    assert codes & {-signal.SIGSEGV, -signal.SIGABRT}, f"it crashes no longer: {codes}"


@pytest.mark.long
@pytest.mark.timeout(200)
def test_after_mooncake_has_given_up_no_late_bytes_come(new_cluster: NewCluster) -> None:
    cluster = new_cluster(forget_seconds=300)
    done = child("give_up", cluster, limit_seconds=180)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_missing_library_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(library, "_load", fail)
    deadlines = library.Deadlines(*(float(seconds) for seconds in DEADLINES.values()))
    with pytest.raises(OSError, match=r"libibverbs\.so\.1: cannot open .* run: apt-get install libibverbs1"):
        library.import_mooncake(deadlines, "tcp", "pool")


def test_neither_plugin_nor_options_import_mooncake() -> None:
    script = (
        "import sys; from offload_backend_mooncake.plugin import MOONCAKE; MOONCAKE.options(master='127.0.0.1:1'); "
        "assert 'mooncake' not in sys.modules; print(MOONCAKE.requires[0].install)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=Path("/"))
    assert (done.returncode, done.stdout) == (0, "pip install 'offload-core[mooncake]'\n"), done.stderr
