"""Loads from a tier in the I/O process that run at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from offload_core.runtime.io_loop import IoLoop
from tests.support.lending_rig import LendingRig
from tests.support.plugin_site import Site
from tests.support.polling import wait_until
from tests.support.transfer_rig import item

THREADS = 4
PLUGIN = """
import asyncio
from pathlib import Path

from offload_core.api import Capabilities, LoadOutcome, LoadReservation, StoreOutcome

FOLDER = Path({folder!r})

class Gated(Backend):
    capabilities = Capabilities(medium="disk", persistent=True, shared=True, sizes=True)

    async def contains(self, keys):
        return [True] * len(keys)

    async def prepare_load(self, keys):
        return LoadReservation([True] * len(keys), nbytes=[None] * len(keys))

    async def load_into(self, keys, buffers):
        (FOLDER / f"begun-{{keys[0].chunk_hash.hex()}}").touch()
        while not (FOLDER / "open").exists():
            await asyncio.sleep(0.01)
        return [LoadOutcome.MISS] * len(keys)

    async def store(self, keys, buffers):
        return [StoreOutcome.REJECTED] * len(keys)

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
    wait_until(lambda: len(list(tmp_path.glob("begun-*"))) == THREADS, "no four loads at once")
    (tmp_path / "open").touch()
    assert {result.status for result in rig.results(THREADS + 2).values()} == {"failed"}
    assert len(list(tmp_path.glob("begun-*"))) == THREADS + 2
