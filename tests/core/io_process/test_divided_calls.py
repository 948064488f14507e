"""The objects of one call are divided among a tier's threads, unless its backend alone works on several at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offload_core.config.loading import load_config
from offload_core.runtime.io_loop import IoLoop
from tests.core.io_process.rig import OBJECT_BYTES, Rig
from tests.support.plugin_site import Site

PLUGIN = """
from offload_core.api import Capabilities, LoadOutcome, LoadReservation, StoreOutcome

class Counting(Backend):
    def write(self, call, keys):
        with open({path!r}, "a") as log:
            log.write(f"{{call}} {{len(keys)}}\\n")

    async def contains(self, keys):
        return [False] * len(keys)

    async def prepare_load(self, keys):
        return LoadReservation([True] * len(keys), nbytes=[{nbytes}] * len(keys))

    async def load_into(self, keys, buffers):
        self.write("load", keys)
        return [LoadOutcome.MISS] * len(keys)

    async def store(self, keys, buffers):
        self.write("store", keys)
        return [StoreOutcome.STORED] * len(keys)

    async def delete(self, keys):
        pass

class One(Counting):
    capabilities = Capabilities(medium="disk", persistent=True, shared=True)

class Several(Counting):
    capabilities = Capabilities(medium="disk", persistent=True, shared=True, sizes=True, parallel=True)

class Remote(Counting):
    capabilities = Capabilities(medium="remote", persistent=True, shared=True)

@hookimpl
def offload_register_backends():
    return [BackendType(name, backend, Options) for name, backend in [("one", One), ("more", Several), ("far", Remote)]]
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def rig_of(io: IoLoop, site: Site, log: Path) -> Iterator[Callable[[str, str], Rig]]:
    rigs: list[Rig] = []

    def make(kind: str, compression: str) -> Rig:
        site.install("counting", PLUGIN.format(path=str(log), nbytes=OBJECT_BYTES))
        config = load_config(
            {
                "io_process": "engine",
                "backends": [{"name": "tier", "type": kind, "io_threads": 4, "compression": compression}],
            }
        )
        rigs.append(Rig(io, config))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.mark.parametrize(
    ("kind", "compression", "is_divided"),
    [("one", "none", True), ("more", "none", False), ("more", "zstd", True), ("far", "none", False)],
)
def test_calls(rig_of: Callable[[str, str], Rig], log: Path, kind: str, compression: str, is_divided: bool) -> None:
    rig = rig_of(kind, compression)
    rig.share_out()
    rig.load(*range(32))
    assert rig.store(*range(32)) == [True] * 32
    for call in ("load", "store"):
        assert _sizes(log, call) == ([16, 16] if is_divided else [32]), "half of the threads are for another call"


def _sizes(log: Path, call: str) -> list[int]:
    """Return the number of objects of each call of the backend."""
    lines = (line.split() for line in log.read_text().splitlines())
    return [int(size) for name, size in lines if name == call]
