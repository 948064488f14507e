"""Small calls of a tier in the I/O process that run at the same time: as many as it has threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from offload_core.runtime.io_loop import IoLoop
from tests.support.lending_rig import LendingRig
from tests.support.plugin_site import Site
from tests.support.polling import wait_until
from tests.support.transfer_rig import SECONDS, item

THREADS = 4
PLUGIN = """
import asyncio
from pathlib import Path

from offload_core.api import Capabilities, LoadOutcome, LoadReservation, StoreOutcome

FOLDER = Path({folder!r})

class Gated(Backend):
    capabilities = Capabilities(medium="disk", persistent=True, shared=True)

    async def wait(self, call, key):
        (FOLDER / f"{{call}}-{{key.chunk_hash.hex()}}").touch()
        while not (FOLDER / "open").exists():
            await asyncio.sleep(0.01)

    async def contains(self, keys):
        return [False] * len(keys)

    async def prepare_load(self, keys):
        return LoadReservation([True] * len(keys))

    async def load_into(self, keys, buffers):
        await self.wait("load", keys[0])
        return [LoadOutcome.MISS] * len(keys)

    async def store(self, keys, buffers):
        await self.wait("store", keys[0])
        return [StoreOutcome.STORED] * len(keys)

    async def delete(self, keys):
        pass

@hookimpl
def offload_register_backends():
    return [BackendType("gated", Gated, Options)]
"""


@pytest.fixture
def rig(io: IoLoop, tmp_path: Path, site: Site) -> Iterator[LendingRig]:
    site.install("gated", PLUGIN.format(folder=str(tmp_path)))
    gated = {"name": "gated", "type": "gated", "io_threads": THREADS}
    rig = LendingRig(io, tmp_path, "engine", more=(gated,))
    yield rig
    rig.close()


def test_small_loads_use_all_threads(rig: LendingRig, tmp_path: Path) -> None:
    for number in range(THREADS + 2):
        rig.load(item(number, number), tier="gated")
    wait_until(lambda: _begun(tmp_path, "load") == THREADS, "no four loads at once")
    (tmp_path / "open").touch()
    assert {result.status for result in rig.results(THREADS + 2).values()} == {"failed"}
    assert _begun(tmp_path, "load") == THREADS + 2


def test_small_stores_use_all_threads_and_one_more_is_ready(rig: LendingRig, tmp_path: Path) -> None:
    for number in range(THREADS + 2):
        rig.engine.submit_stores([item(number, number)])
    wait_until(lambda: _begun(tmp_path, "store") == THREADS + 1, "no five stores at once")
    (tmp_path / "open").touch()
    assert rig.engine.drain_stores(SECONDS)
    assert _begun(tmp_path, "store") == THREADS + 2


def _begun(folder: Path, call: str) -> int:
    return len(list(folder.glob(f"{call}-*")))
