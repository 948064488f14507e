"""The recipe of the document on a real LMCache server: chunks come back from our tiers after its end."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from tests.backends.lmcache.calls import opened
from tests.support.clusters import lmcache
from tests.support.documents import blocks
from tests.support.paths import ROOT
from tests.support.polling import wait_until
from tests.support.server_process import ServerProcess, accepts, free_port

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(180),
    pytest.mark.skipif(lmcache.why_not() is not None, reason=str(lmcache.why_not())),
]

COUNT, NBYTES = 6, 300_000


def content(number: int) -> bytes:
    return bytes([number + 1]) * NBYTES


def test_the_recipe_for_lmcache_serves(tmp_path: Path) -> None:
    """The objects arrive by our module for LMCache's server, since its usual clients need a GPU."""
    document = (ROOT / "docs" / "elsewhere.md").read_text()
    port, folder = free_port(), tmp_path / "kv-cache"
    (tmp_path / "offload.yaml").write_text(blocks(document, "yaml")[0])
    (start,) = (block for block in blocks(document, "bash") if block.startswith("lmcache"))
    module = {"module_path": "offload_backend_lmcache.server", "config": {"address": f"127.0.0.1:{port}"}}
    more = [
        "--server-module", json.dumps(module), "--port", free_port(), "--http-port", free_port(),
        "--prometheus-port", free_port(), "--max-workers", 1,
    ]  # fmt: skip
    program = f"cd {tmp_path} && exec {sys.executable} -c 'from lmcache.cli.main import main; main()' server"
    command = start.replace("lmcache server", program).replace("--l1-size-gb 20", "--l1-size-gb 0.25").strip()
    environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false"}
    server = ServerProcess(
        ["bash", "-c", f"{command} {shlex.join(map(str, more))}"],
        lambda: accepts(port), tmp_path / "server.log", environment,
    )  # fmt: skip
    try:
        server.start()
        with opened(f"127.0.0.1:{port}") as calls:
            calls.store(*((number, content(number)) for number in range(COUNT)))
            # An object and the record of its size are two chunks.
            wait_until(lambda: len(list(folder.rglob("*.kv"))) == 2 * COUNT, "LMCache stores nothing in our tier")
        server.kill()
        server.start()
        with opened(f"127.0.0.1:{port}") as calls:
            assert list(calls.contains(*range(COUNT), 99)) == [True] * COUNT + [False]
            loaded = calls.load_into(*((number, bytearray(NBYTES)) for number in range(COUNT)))
        assert [bytes(got) for _, got in loaded] == list(map(content, range(COUNT)))
    finally:
        server.stop()
