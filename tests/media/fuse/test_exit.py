"""A process whose threads are stuck in a hung file system ends by itself, says nothing and leaves nothing torn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload_core.cli import app
from tests.media.fuse.conftest import PLACES
from tests.media.fuse.mount import FaultFs
from tests.media.fuse.worker import EXIT_SECONDS, Worker
from tests.support.polling import wait_until


@pytest.fixture
def worker(request: pytest.FixtureRequest, fault_fs: FaultFs, tmp_path: Path) -> Iterator[Worker]:
    """A process with a tier on the fault file system, which has stored something there."""
    settings: dict[str, Any] = {"backends": [{"name": "files", **PLACES[request.param](fault_fs)}]}
    (tmp_path / "offload.json").write_text(json.dumps(settings))
    process = Worker(settings, tmp_path / "errors")
    yield process
    fault_fs.clear()
    fault_fs.resume()
    process.close()


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
def test_process_ends_by_itself(worker: Worker, fault_fs: FaultFs, tmp_path: Path, hangs: str) -> None:
    rule = None
    if hangs == "stopped":
        fault_fs.pause()
    else:
        rule = fault_fs.add(hangs, "*", "hang")
    worker.begin()
    if rule is not None:
        fault_fs.wait_for_hit(rule)
    assert worker.shut_down() < EXIT_SECONDS
    wait_until(worker.has_ended, "its main thread has not ended")
    if rule is not None:
        assert not worker.is_gone(), "a thread is in a call that not even SIGKILL ends; the kernel keeps it"
    fault_fs.clear()
    fault_fs.resume()
    wait_until(worker.is_gone, "it is not gone although nothing hangs")
    assert worker.exit_status == 0
    assert worker.errors == ""
    verified = CliRunner().invoke(app, ["verify", str(tmp_path / "offload.json"), "--json", "--quiet"])
    assert verified.exit_code == 0, verified.output
    assert len(list(fault_fs.backing.rglob("*.kv"))) >= 4
