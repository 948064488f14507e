"""The recipe of the document: its commands start a server, and its configuration passes ``offload-core check``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.documents import blocks
from tests.support.paths import ROOT
from tests.support.server_process import ServerProcess, accepts, free_port

DOCUMENT = ROOT / "docs" / "distributed.md"

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]


@pytest.fixture
def port(lmcache_logs: Path, tmp_path: Path) -> Iterator[int]:
    """The port of a server that was started by the document's command, with smaller sizes and free ports."""
    port, start = free_port(), blocks(DOCUMENT.read_text(), "console")[0].removeprefix("$ ")
    ports = f"--port {free_port()} --http-port {free_port()} --prometheus-port {free_port()}"
    for shown, used in (
        ("10.0.0.5:7555", f"127.0.0.1:{port}"),
        ("/mnt/kv", str(tmp_path)),
        ("--l1-size-gb 100", f"--l1-size-gb 0.25 {ports}"),
        ("lmcache server", f"{sys.executable} -c 'from lmcache.cli.main import main; main()' server"),
    ):
        assert shown in start, f"the document does not show {shown}"
        start = start.replace(shown, used)
    environment = {"LMCACHE_TRACK_USAGE": "false"}
    server = ServerProcess(["bash", "-c", start], lambda: accepts(port), lmcache_logs / "recipe.log", environment)
    server.start()
    yield port
    server.stop()


def test_the_recipe_of_the_document_works(port: int, tmp_path: Path) -> None:
    configuration = blocks(DOCUMENT.read_text(), "yaml")[0]
    path = tmp_path / "offload.yaml"
    path.write_text(configuration.replace("10.0.0.5:7555", f"127.0.0.1:{port}"))
    command = f"{sys.executable} -m offload_core.cli check --tier cluster {path}"
    without, right = (
        subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, env=dict(os.environ))
        for script in (command, f"OFFLOAD_CORE_CLUSTER_TOKEN=secret {command}")
    )
    assert right.returncode == 0, right.stdout + right.stderr
    assert without.returncode == 1, "a client without the token is served"
    assert "has another token than this tier" in without.stderr
