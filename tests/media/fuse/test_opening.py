"""A file system that hangs while it is named, opened or closed: the others start, serve and end without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from offload_core.api.keys import ObjectKey
from offload_core.config.loading import load_config
from offload_core.config.model import OffloadConfig
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.tiers.opening import close_tiers, open_tiers
from offload_core.tiers.tier import Tier
from tests.media.fuse.conftest import PLACES
from tests.media.fuse.mount import FaultFs
from tests.support.memory_backend import key
from tests.support.polling import wait_until

SECONDS = 30
DEADLINE_SECONDS = 0.3
SLACK_SECONDS = 8.0
"""A busy machine's; what hangs here hangs until the test lets it go."""


@pytest.fixture(params=["disk", "nfs", pytest.param("disk-bounded", marks=pytest.mark.long)])
def configured(request: pytest.FixtureRequest, fault_fs: FaultFs, tmp_path: Path) -> Callable[[], OffloadConfig]:
    """A function that reads a configuration with a tier on the fault file system and a healthy one."""

    def read() -> OffloadConfig:
        return load_config(
            {
                "open_timeout_seconds": DEADLINE_SECONDS,
                "lookup_timeout_seconds": DEADLINE_SECONDS,
                "close_timeout_seconds": DEADLINE_SECONDS,
                "breaker_pause_seconds": 0.1,
                "breaker_max_pause_seconds": 0.2,
                "backends": [
                    {"name": "files", **PLACES[request.param](fault_fs)},
                    {"name": "healthy", "type": "disk", "path": str(tmp_path / "healthy"), "open_timeout_seconds": 30},
                ],
            }
        )

    return read


@pytest.fixture
def released(fault_fs: FaultFs, io: IoLoop) -> Iterator[None]:
    """Nothing hangs any more before the I/O loop is asked for what is left on it."""
    yield
    fault_fs.resume()


def _close(tiers: list[Tier], io: IoLoop) -> float:
    started = time.monotonic()
    close_tiers(tiers, io)
    return time.monotonic() - started


def _lookup(io: IoLoop, tier: Tier) -> list[bool]:
    keys: list[ObjectKey] = [key(1), key(2)]
    return io.submit(tier.lookup(keys)).result(SECONDS)


@pytest.mark.usefixtures("released")
def test_start_goes_on_without_a_tier_whose_opening_hangs_and_uses_it_when_it_is_open(
    configured: Callable[[], OffloadConfig], fault_fs: FaultFs, io: IoLoop
) -> None:
    config, counters = configured(), Counters()
    fault_fs.pause()
    started = time.monotonic()
    tiers = open_tiers(config, io, counters)
    assert time.monotonic() - started < DEADLINE_SECONDS + SLACK_SECONDS
    files, healthy = tiers
    assert (files.health.admits("load"), healthy.health.admits("load")) == (False, True)
    assert _lookup(io, files) == _lookup(io, healthy) == [False, False]
    assert counters.take()["breaker_refused", "files"] > 0

    fault_fs.resume()
    wait_until(lambda: files.health.admits("lookup"), "the tier is not used although it is open")
    assert _lookup(io, files) == [False, False]
    assert counters.take()["lookup_misses", "files"] == 2
    _close(tiers, io)


@pytest.mark.usefixtures("released")
def test_end_does_not_wait_for_a_tier_whose_opening_hangs(
    configured: Callable[[], OffloadConfig], fault_fs: FaultFs, io: IoLoop
) -> None:
    config = configured()
    fault_fs.pause()
    tiers = open_tiers(config, io, Counters())
    assert _close(tiers, io) < DEADLINE_SECONDS + SLACK_SECONDS


@pytest.mark.usefixtures("released")
def test_end_does_not_wait_for_a_tier_whose_closing_hangs(
    configured: Callable[[], OffloadConfig], fault_fs: FaultFs, io: IoLoop
) -> None:
    tiers = open_tiers(configured(), io, Counters())
    fault_fs.pause()
    assert _close(tiers, io) < DEADLINE_SECONDS + SLACK_SECONDS


def test_configuration_that_names_a_folder_on_a_hung_file_system_is_read(
    configured: Callable[[], OffloadConfig], fault_fs: FaultFs
) -> None:
    fault_fs.pause()
    with ThreadPoolExecutor(1) as other_thread:  # this one would not come back to let it go
        reading = other_thread.submit(configured)
        try:
            names: list[Any] = [tier.common.name for tier in reading.result(SLACK_SECONDS).tiers]
        finally:
            fault_fs.resume()
    assert names == ["files", "healthy"]


def test_command_reports_a_hung_file_system_and_does_the_others(fault_fs: FaultFs, tmp_path: Path) -> None:
    healthy = {"name": "healthy", "type": "disk", "path": str(tmp_path / "healthy")}
    config = {
        "open_timeout_seconds": DEADLINE_SECONDS,
        "lookup_timeout_seconds": DEADLINE_SECONDS,
        "backends": [{"name": "files", **PLACES["disk"](fault_fs)}, {**healthy, "open_timeout_seconds": 30}],
    }
    (tmp_path / "offload.json").write_text(json.dumps(config))
    fault_fs.pause()
    done = subprocess.run(
        [sys.executable, "-c", "from offload_core.cli import app; app()", "check", str(tmp_path / "offload.json")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "tier 'files': open: no answer within" in done.stderr
    assert list((tmp_path / "healthy").iterdir()), "the other tier was checked"
