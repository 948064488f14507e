"""Log lines of a tier name the half of the engine that speaks, in this process and in the I/O process."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from offload_core.config.loading import load_config
from offload_core.config.model import OffloadConfig
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.tiers.opening import TierHost, close_tiers, open_tiers
from offload_core.tiers.tier import Tier
from tests.core.io_process.rig import OBJECT_BYTES, SECONDS, Rig, key
from tests.support.plugin_site import Site
from tests.support.polling import wait_until

PLUGIN = """
from offload_core.api import Capabilities, LoadOutcome

class Talker(Backend):
    def __init__(self, options, context):
        super().__init__(options, context)
        self.log = context.logger("talker")

    async def open(self):
        self.log.warning("open at 100%")

    async def contains(self, keys):
        self.log.warning("asked for %d objects", len(keys))
        return [False] * len(keys)

    async def load_into(self, keys, buffers):
        return [LoadOutcome.MISS] * len(keys)

    async def store(self, keys, buffers):
        raise OSError("gone")

    async def delete(self, keys):
        pass

class Shared(Talker):
    capabilities = Capabilities(medium="disk", persistent=True, shared=True)

class Private(Talker):
    capabilities = Capabilities(medium="host", persistent=False, shared=False)

@hookimpl
def offload_register_backends():
    return [BackendType("shared", Shared, Options), BackendType("private", Private, Options)]
"""


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[str], Sequence[str]]:
    """Return the log lines that contain a text, once there is one."""
    caplog.set_level(logging.WARNING)

    def matching(text: str) -> Sequence[str]:
        wait_until(lambda: any(text in message for message in caplog.messages), f"no line says {text!r}")
        return [message for message in caplog.messages if text in message]

    return matching


@pytest.fixture
def closing() -> Iterator[Callable[[Rig], Rig]]:
    """Close rigs in the end."""
    rigs: list[Rig] = []

    def close_later(rig: Rig) -> Rig:
        rigs.append(rig)
        return rig

    yield close_later
    for rig in rigs:
        rig.close()


def configured(site: Site, kind: str, io_process: str) -> OffloadConfig:
    site.install("talkers", PLUGIN)
    return load_config({"io_process": io_process, "backends": [{"name": "50%s", "type": kind}]})


def opened(config: OffloadConfig, io: IoLoop, half: str, host: TierHost | None = None) -> Tier:
    (tier,) = open_tiers(config, io, Counters(), half=half, host=host)
    return tier


def test_in_one_process(io: IoLoop, site: Site, lines: Callable[[str], Sequence[str]]) -> None:
    config = configured(site, "shared", "off")
    tier = opened(config, io, "scheduler")
    io.submit(tier.lookup([key(1), key(2)])).result(SECONDS)
    close_tiers([tier], io, SECONDS)
    assert lines("open at") == ["tier '50%s' (scheduler): open at 100%"]
    assert lines("asked for") == ["tier '50%s' (scheduler): asked for 2 objects"]


def test_outside_an_engine_a_line_names_the_tier_alone(
    io: IoLoop, site: Site, lines: Callable[[str], Sequence[str]]
) -> None:
    tiers = open_tiers(configured(site, "shared", "off"), io, Counters())
    close_tiers(tiers, io, SECONDS)
    assert lines("open at") == ["tier '50%s': open at 100%"]


def test_in_the_io_process(
    io: IoLoop, site: Site, lines: Callable[[str], Sequence[str]], closing: Callable[[Rig], Rig]
) -> None:
    """Each half has a backend of its own for a shared medium."""
    rig = closing(Rig(io, configured(site, "shared", "engine")))
    tiers = [opened(rig.config, io, half, rig.processes) for half in ("scheduler", "worker 1")]
    for tier in tiers:
        io.submit(tier.lookup([key(1)])).result(SECONDS)
    rig.tiers += tiers
    assert rig.store(1, tier=2) == [False]
    wait_until(lambda: len(lines("asked for")) >= 2, "a line is missing")
    asked = {f"tier '50%s' ({half}): asked for 1 objects" for half in ("scheduler", "worker 1")}
    assert set(lines("asked for")) == asked
    assert lines("store failed")[0].startswith("tier '50%s' (worker 1): store failed ")


def test_a_backend_that_several_halves_use_names_those_that_have_opened_it(
    io: IoLoop, site: Site, lines: Callable[[str], Sequence[str]], closing: Callable[[Rig], Rig]
) -> None:
    rig = closing(Rig(io, configured(site, "private", "engine")))
    one, other = (opened(rig.config, io, f"worker {rank}", rig.processes) for rank in range(2))
    io.submit(other.lookup([key(1)])).result(SECONDS)
    assert lines("open at") == ["tier '50%s': open at 100%"]  # the rig's own tiers are no half
    assert lines("asked for") == ["tier '50%s' (worker 0, worker 1): asked for 1 objects"]
    close_tiers([one], io, SECONDS)
    io.submit(other.lookup([key(1)])).result(SECONDS)
    rig.tiers.append(other)
    wait_until(lambda: len(lines("asked for")) >= 2, "a line is missing")
    assert lines("asked for")[1] == "tier '50%s' (worker 1): asked for 1 objects"


def test_damage_and_backends_own_lines_in_a_replaced_process(
    io: IoLoop, tmp_path: Path, lines: Callable[[str], Sequence[str]], closing: Callable[[Rig], Rig]
) -> None:
    """The half outlives the I/O process."""
    config = {"name": "nvme", "type": "disk", "path": str(tmp_path / "objects")}
    rig = closing(Rig.of(io, config, half="worker 3"))
    assert rig.store(1) == [True]
    first = rig.pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: rig.pid != first and rig.lookup(1) == [True], "the tier did not come back")
    (path,) = (
        path for path in (tmp_path / "objects").rglob("*") if path.is_file() and path.stat().st_size >= OBJECT_BYTES
    )
    path.write_bytes(bytes(path.stat().st_size))
    rig.load(1)
    assert lines("damaged object")[0].startswith("tier 'nvme' (worker 3): damaged object, ")
