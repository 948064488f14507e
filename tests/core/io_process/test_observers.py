"""Wrappers and observers of plugins run in the I/O process, where the tier runs."""

from __future__ import annotations

import os
from pathlib import Path

from offload_core.api.backend import LoadOutcome
from offload_core.api.events import TierClosed
from offload_core.runtime.io_loop import IoLoop
from tests.core.io_process.rig import Rig
from tests.support.plugin_site import Site
from tests.support.polling import wait_until

WATCHER = """
import os
from pathlib import Path
from offload_core.api import BackendWrapper

LINES = Path({lines!r})

@hookimpl
def offload_observe(event):
    with LINES.open("a") as file:
        print(os.getpid(), type(event).__name__, event.tier, file=file)

@hookimpl
def offload_wrap_backend(backend, tier):
    with LINES.open("a") as file:
        print(os.getpid(), "wrapped", tier.name, file=file)
    return BackendWrapper(backend)
"""


SLOW = """
import time
from pathlib import Path

@hookimpl
def offload_observe(event):
    while not Path({path!r}).exists():
        time.sleep(0.01)
"""


def test_events_that_a_slow_observer_drops_in_the_process_are_counted_in_the_engine(
    site: Site, tmp_path: Path, io: IoLoop
) -> None:
    site.install("slow", SLOW.format(path=str(tmp_path / "go on")))
    rig = Rig.of(io, {"name": "disk", "type": "disk", "path": str(tmp_path / "kv")})
    for _ in range(2000):
        rig.process.observe(TierClosed("disk"), rig.counters)
    dropped = 0.0

    def are_counted() -> bool:
        nonlocal dropped
        dropped += rig.counters.take().get(("events_dropped", "disk"), 0)
        return dropped > 900

    wait_until(are_counted, "the drops are not counted")
    assert dropped < 1000
    (tmp_path / "go on").touch()
    rig.close()


def test_hooks_run_in_the_process_and_all_events_are_delivered_before_its_end(
    site: Site, tmp_path: Path, io: IoLoop
) -> None:
    lines = tmp_path / "lines"
    site.install("watcher", WATCHER.format(lines=str(lines)))
    rig = Rig.of(io, {"name": "disk", "type": "disk", "path": str(tmp_path / "kv")})
    pid = rig.pid
    rig.store(1)
    assert rig.load(1) == [LoadOutcome.HIT]
    rig.close()
    seen = [line.split() for line in lines.read_text().splitlines()]
    assert {int(line[0]) for line in seen} == {pid} != {os.getpid()}
    assert [line[1] for line in seen] == ["wrapped", "TierOpened", "StoresEnded", "LoadsEnded", "TierClosed"]
    assert {line[2] for line in seen} == {"disk"}
