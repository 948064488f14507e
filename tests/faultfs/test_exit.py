"""A process whose threads are stuck in a hung file system ends by itself, says nothing and leaves nothing torn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload_core.cli import app
from tests.faultfs.conftest import PLACES
from tests.faultfs.mount import FaultFs, process_state, wait_until

EXIT_SECONDS = 10.0

# What a worker does: a load and a store are on their way when it shuts down, as the engine tells it to.
_SCRIPT = """
import json, sys, time
from offload_core.config import load_config
from offload_core.runtime import IoLoop
from offload_core.tier_opening import close_tiers
from tests.unit.transfer_rig import Rig, item

rig = Rig(IoLoop.acquire())
rig.add_tier(load_config(json.loads(sys.argv[1])).tiers[0])
engine = rig.start()
assert all(rig.store_all(*(item(number, block=number) for number in range(4))).values())
print("stored", flush=True)
sys.stdin.readline()
rig.load(item(0, block=8), tier="files")
engine.submit_stores([item(9, block=1)])
sys.stdin.readline()
started = time.monotonic()
engine.drain_stores(1)
engine.close()
close_tiers(rig.tiers, rig.io)
rig.io.release()
print(time.monotonic() - started, flush=True)
"""


@pytest.fixture
def worker(request: pytest.FixtureRequest, fault_fs: FaultFs, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with a tier on the fault file system, which has stored something there."""
    settings: dict[str, Any] = {"backends": [{"name": "files", **PLACES[request.param](fault_fs)}]}
    (tmp_path / "offload.json").write_text(json.dumps(settings))
    with (tmp_path / "errors").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, json.dumps(settings)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        assert process.stdout.readline() == "stored\n", (tmp_path / "errors").read_text()
        yield process
        fault_fs.clear()
        fault_fs.resume()
        process.kill()
        process.wait()


def _go_on(worker: subprocess.Popen[str]) -> None:
    assert worker.stdin is not None
    worker.stdin.write("\n")
    worker.stdin.flush()


_KINDS = ("disk", "nfs", "disk-bounded")
_HANGS = ("*", "read write", "stopped")
_QUICK = (("disk", "*"), ("nfs", "read write"))


@pytest.mark.parametrize(
    ("worker", "hangs"),
    [
        pytest.param(kind, hangs, marks=() if (kind, hangs) in _QUICK else pytest.mark.long)
        for kind in _KINDS
        for hangs in _HANGS
    ],
    indirect=["worker"],
)
def test_process_ends_by_itself(worker: subprocess.Popen[str], fault_fs: FaultFs, tmp_path: Path, hangs: str) -> None:
    rule = None
    if hangs == "stopped":
        fault_fs.pause()
    else:
        rule = fault_fs.add(hangs, "*", "hang")
    _go_on(worker)
    if rule is not None:
        fault_fs.wait_for_hit(rule)
    _go_on(worker)
    assert worker.stdout is not None
    assert float(worker.stdout.readline()) < EXIT_SECONDS
    wait_until(lambda: worker.poll() is not None or process_state(worker.pid) == "Z", "its main thread has not ended")
    if rule is not None:
        assert worker.poll() is None, "a thread is in a call that not even SIGKILL ends; the kernel keeps it"
    fault_fs.clear()
    fault_fs.resume()
    wait_until(lambda: worker.poll() is not None, "it is not gone although nothing hangs")
    assert worker.returncode == 0
    assert (tmp_path / "errors").read_text() == ""
    verified = CliRunner().invoke(app, ["verify", str(tmp_path / "offload.json"), "--json", "--quiet"])
    assert verified.exit_code == 0, verified.output
    assert len(list(fault_fs.backing.rglob("*.kv"))) >= 4
